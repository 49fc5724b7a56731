"""Every reasoning parser on samples of its format, in every split, and on garbage."""

import random

import pytest

from rayllm.parsers.registry import reasoning_parsers

from .samples import Parsed, cuts, parse

_RAW_CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
_XTML_CALL = '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
_INKLING_CALL = '<|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {}}<|end_message|>'
_ANALYSIS = "<|channel|>analysis<|message|>Hm <b>.<|end|>"

SAMPLES: dict[str, list[tuple[str, str, str]]] = {
    "qwen3": [
        ("<think>\nHm <b>. 🫠\n</think>\n\nYes </think>.", "\nHm <b>. 🫠\n", "\n\nYes </think>."),
        ("<think>cut", "cut", ""),
        ("No <think>thought</think>.", "", "No <think>thought</think>."),
        (" \n", "", " \n"),
    ],
    "deepseek_r1": [
        ("<think>abc</think>def", "abc", "def"),
        ("\nabc</think>\n\ndef", "\nabc", "\n\ndef"),
        ("\n<think>abc", "abc", ""),
        ("</think>def", "", "def"),
        ("abc <think", "abc <think", ""),
    ],
    "kimi_k2": [
        ("<think>abc</think>def", "abc", "def"),
        ("abc<|tool_calls_section_begin|>x", "abc", "<|tool_calls_section_begin|>x"),
    ],
    "seed_oss": [("<seed:think>abc</seed:think>def", "abc", "def"), ("<think>abc</think>", "", "<think>abc</think>")],
    "mistral": [("[THINK]abc[/THINK]def", "abc", "def"), ("[THIN", "", "[THIN")],
    "gemma4": [("<|channel>thought\nabc<channel|>def", "abc", "def")],
    "granite": [
        ("Here is my thought process: abc Here is my response: def", " abc ", " def"),
        ("Here's my thought process:abc", "abc", ""),
        ("Here is an answer", "", "Here is an answer"),
    ],
    "hunyuan_a13b": [
        ("<think>\nabc\n</think>\n<answer>\ndef\n</answer>", "\nabc\n", "def"),
        ("<think>abc</think>\ndef", "abc", "\ndef"),
        ("<think>abc</think>\n<answ", "abc", "\n<answ"),
    ],
    "cohere_command3": [
        ("<|START_THINKING|>abc<|END_THINKING|><|START_RESPONSE|>def<|END_RESPONSE|>", "abc", "def"),
        ("<|START_RESPONSE|>def<|END_RESPONSE|>", "", "def"),
        ("<|START_THINKING|>abc<|END_THINKING|><|START_ACTION|>[", "abc", "<|START_ACTION|>["),
    ],
    "cohere_command4": [("<|START_THINKING|>abc<|END_THINKING|><|START_TEXT|>def<|END_TEXT|>", "abc", "def")],
    "apertus": [("<|inner_prefix|>abc<|inner_suffix|>def", "abc", "def"), ("def", "", "def")],
    "ernie45": [("abc</think>\n\n\n<response>\ndef\n</response>\n", "abc", "def\n")],
    "minimax_m2_append_think": [("abc</think>def", "", "<think>abc</think>def")],
    "identity": [("<think>abc</think>def", "", "<think>abc</think>def")],
    "minimax_m3": [
        ("<mm:think>abc</mm:think>def", "abc", "def"),
        ("</mm:think>def", "", "def"),
        ("def</mm:think>", "", "def</mm:think>"),
    ],
    "solar_open2": [("<|think:start|>abc<|think:end|>def", "abc", "def")],
    "hy_v3": [
        ("<think>abc</think>def", "abc", "def"),
        ("<think:opensource>abc</think:opensource>def", "abc", "def"),
    ],
    "kimi_k3": [
        (
            "<|open|>think<|sep|>abc<|close|>think<|sep|><|open|>response<|sep|>def<|close|>response<|sep|>"
            "<|close|>message<|sep|>",
            "abc",
            "def",
        ),
        (f"<|open|>think<|sep|>abc{_XTML_CALL}<|close|>message<|sep|>", "abc", _XTML_CALL),
        ("def <|open|> x <|close|>response<|sep|>", "", "def <|open|> x "),
    ],
    "inkling": [
        ("<|content_thinking|>abc<|end_message|><|message_model|><|content_text|>def<|end_message|>", "abc", "def"),
        (f"<|content_thinking|>abc<|end_message|>{_INKLING_CALL}", "abc", _INKLING_CALL),
        (_INKLING_CALL.removeprefix("<|message_model|>"), "", _INKLING_CALL),
        ("Just text <|message_model|> def", "", "Just text <|message_model|> def"),
        ("<|content_thinking|>abc<|end", "abc<|end", ""),
    ],
    "openai_gptoss": [
        (f"{_ANALYSIS}<|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Hm <b>.", "Yes."),
        (f"{_ANALYSIS}{_RAW_CALL}", "Hm <b>.", _RAW_CALL),
        (_RAW_CALL.removeprefix("<|start|>assistant"), "", _RAW_CALL),
        (f"{_ANALYSIS}<|start|>assistant<|channel|>final<|message|>cut <|ret", "Hm <b>.", "cut <|ret"),
        ("No message at all.", "", "No message at all."),
        ("<|channel|>nothing", "", "<|channel|>nothing"),
    ],
}
EACH = [pytest.param(name, *sample, id=f"{name}-{i}") for name in SAMPLES for i, sample in enumerate(SAMPLES[name])]


def parsed(name: str, pieces: list[str], inside: bool | None = None) -> Parsed:
    return parse(reasoning_parsers()[name](inside), pieces)


def test_every_parser_has_samples() -> None:
    ours = {parser for parser in reasoning_parsers().values() if parser.__module__.startswith("rayllm.")}
    assert {reasoning_parsers()[name] for name in SAMPLES} == ours


@pytest.mark.parametrize(("name", "text", "reasoning", "content"), EACH)
def test_meaning_in_every_split(name: str, text: str, reasoning: str, content: str) -> None:
    whole, draw = parsed(name, [text]), random.Random(3)
    assert (whole.reasoning, whole.content) == (reasoning, content)
    assert parsed(name, list(text)) == whole
    for i in range(len(text)):
        assert parsed(name, [text[:i], text[i:]]) == whole
    for _ in range(10):
        assert parsed(name, cuts(text, draw)) == whole


@pytest.mark.parametrize("name", SAMPLES)
def test_garbage(name: str) -> None:
    parser, draw = reasoning_parsers()[name], random.Random(name)
    marks = [
        *parser.markers,
        *getattr(parser, "begins", ()),
        *getattr(parser, "ends", ()),
        " ",
        "\n",
        "<",
        "|",
        "assistant",
    ]
    for _ in range(200):
        pieces = [draw.choice(marks) for _ in range(draw.randrange(12))]
        words = [f"zq{k}x" for k in range(3)]
        for word in words:
            pieces.insert(draw.randrange(len(pieces) + 1), word)
        text = "".join(pieces)
        out = parsed(name, [text])
        assert parsed(name, cuts(text, draw)) == out
        assert all(word in out.all_text for word in words), text


class TestPrompts:
    @pytest.mark.parametrize(
        ("name", "prompt", "inside"),
        [
            ("qwen3", "<|im_start|>assistant\n<think>\n", True),
            ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
            ("qwen3", "<|im_start|>assistant\n", None),
            ("deepseek_r1", "<｜Assistant｜></think>", False),
            ("seed_oss", "assistant\n<seed:think>", True),
            ("gemma4", "<|turn>model\n<|channel>thought\n", True),
            ("openai_gptoss", "<|start|>assistant", None),
            ("kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>', True),
            ("kimi_k3", "<|close|>message<|sep|><|open|>response<|sep|>", False),
            ("kimi_k3", '<|open|>message role="assistant"<|sep|>', None),
            ("minimax_m3", "]~b]ai\n<mm:think>", True),
            ("hy_v3", "<think:opensource></think:opensource>", False),
        ],
    )
    def test_the_end_of_a_prompt_shows(self, name: str, prompt: str, inside: bool | None) -> None:
        assert reasoning_parsers()[name].inside_after(prompt, None) is inside

    def test_a_message_that_goes_on(self) -> None:
        parser = reasoning_parsers()["deepseek_r1"]
        assert parser.inside_after("", "<think>half a thou") is True
        assert parser.inside_after("", "<think>a</think>half an ans") is False
        assert parser.inside_after("", "half an ans") is False

    def test_within_and_after_reasoning(self) -> None:
        assert parsed("qwen3", ["abc</think>def"], inside=True).reasoning == "abc"
        assert parsed("deepseek_r1", ["abc"], inside=False).content == "abc"
        assert parsed("deepseek_r1", ["<think>abc"], inside=False).content == "<think>abc"
