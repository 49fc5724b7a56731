"""Tool calls and reasoning in chats: the parsers of a server on its way to clients."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers

from rayllm.api.fake import Script
from rayllm.messages.sampling import Thinking
from rayllm.parsers.registry import tool_parsers
from rayllm.render.tokenizer import SpecialTokens, Tokenizer

from ..render.samples import CHAT_TEMPLATE, byte_level, byte_level_backend
from .conftest import Harness, events, finish, joined, ok, refused

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = (
    'ok <tool_call>{"name":"add","arguments":{"a":1,"b":"x}\\"y"}}</tool_call>'
    '<tool_call>{"name":"now","arguments":{}}</tool_call>'
)
MEANT = [("add", {"a": 1, "b": 'x}"y'}), ("now", {})]


def make(tokenizer: Tokenizer | None = None, tools: str | None = "hermes", reasoning: str | None = None) -> Harness:
    return Harness(
        tokenizer=tokenizer, max_model_len=4096, tool_parser=tools, auto_tools=tools is not None,
        reasoning_parser=reasoning,
    )  # fmt: skip


@pytest.fixture
def api() -> Harness:
    return make()


@pytest.fixture
def r1() -> Harness:
    return make(tools=None, reasoning="deepseek_r1")


def special(*texts: str, template: str = CHAT_TEMPLATE) -> Tokenizer:
    """A tokenizer that has these texts as special tokens too."""
    backend = byte_level_backend()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in texts])
    ids = {backend.token_to_id(text) for text in ("<|end|>", "<|user|>", "<|assistant|>", *texts)}
    named = {"eos_token": "<|end|>"}
    return Tokenizer(backend, SpecialTokens(eos_id=0, ids=frozenset(ids), named=named), {"default": template})


def script(api: Harness, text: str, step: int = 1, **more: Any) -> None:
    """Let every choice give a text, some tokens an output, and stop."""
    ids = api.ids(text)
    more = {"finish_reason": "stop", "stop_token_id": 0, **more}
    if more["finish_reason"] == "stop":
        ids = [*ids, 0]
    api.scripts(Script([ids[i : i + step] for i in range(0, len(ids), step)], **more))


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def streamed_calls(chunks: Sequence[dict[str, Any]], index: int = 0) -> list[tuple[str, Any]]:
    """The calls of one choice of a stream, whose first entries have ids, types and names, and the later ones none."""
    names: list[str] = []
    arguments: list[str] = []
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        for call in choice["delta"].get("tool_calls", []):
            function = call["function"]
            if call["index"] == len(names):
                assert call["id"]
                assert call["type"] == "function"
                names.append(function["name"])
                arguments.append(function["arguments"])
            else:
                assert set(call) == {"index", "function"}
                assert set(function) == {"arguments"}
                arguments[call["index"]] += function["arguments"]
    return [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


def thought(chunks: Sequence[dict[str, Any]], key: str = "reasoning") -> str:
    return "".join(c["delta"].get(key) or "" for chunk in chunks for c in chunk["choices"])


class TestToolCalls:
    @pytest.mark.parametrize("choice", [None, "auto"])
    async def test_whole(self, api: Harness, choice: str | None) -> None:
        script(api, CALLS)
        answer = ok(await api.chat(tools=TOOLS, tool_choice=choice))["choices"][0]
        message = answer["message"]
        assert calls_of(message) == MEANT
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert all(
            call["type"] == "function" and set(call) == {"id", "type", "function"} for call in message["tool_calls"]
        )
        assert (message["content"], answer["finish_reason"], answer["stop_reason"]) == ("ok", "tool_calls", None)

    @pytest.mark.parametrize("step", [1, 2, 5, 1000])
    async def test_streamed(self, api: Harness, step: int) -> None:
        script(api, CALLS, step)
        chunks = events(await api.chat(tools=TOOLS, stream=True))
        assert streamed_calls(chunks) == MEANT
        assert joined(chunks) == "ok"
        assert not any("<" in (c["delta"].get("content") or "") for chunk in chunks for c in chunk["choices"])
        assert finish(chunks) == ["tool_calls"]
        assert all(c["delta"] or c["finish_reason"] for chunk in chunks for c in chunk["choices"])

    async def test_no_content(self, api: Harness) -> None:
        script(api, CALLS.removeprefix("ok "))
        assert ok(await api.chat(tools=TOOLS))["choices"][0]["message"]["content"] is None
        script(api, "")
        assert ok(await api.chat(tools=TOOLS))["choices"][0]["message"]["content"] == ""

    async def test_no_calls(self, api: Harness) -> None:
        text = "You could use <tool_call> here.\n"
        script(api, text)
        answer = ok(await api.chat(tools=TOOLS))["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in answer["message"]
        assert joined(events(await api.chat(tools=TOOLS, stream=True))) == text

    async def test_only_where_tools_may_be_called(self, api: Harness) -> None:
        script(api, CALLS)
        for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = ok(await api.chat(**body))["choices"][0]
            assert (answer["message"]["content"], answer["finish_reason"]) == (CALLS, "stop")

    async def test_one_call_only(self, api: Harness) -> None:
        script(api, CALLS)
        body = {"tools": TOOLS, "parallel_tool_calls": False}
        assert calls_of(ok(await api.chat(**body))["choices"][0]["message"]) == MEANT[:1]
        chunks = events(await api.chat(stream=True, **body))
        assert streamed_calls(chunks) == MEANT[:1]
        assert finish(chunks) == ["tool_calls"]

    async def test_cut(self, api: Harness) -> None:
        for text in (CALLS[:30], CALLS[:45]):
            script(api, text, finish_reason="length")
            answer = ok(await api.chat(tools=TOOLS))["choices"][0]
            assert answer["finish_reason"] == "length"
            assert answer["message"].get("tool_calls") != []
            assert finish(events(await api.chat(tools=TOOLS, stream=True))) == ["length"]

    async def test_stop_strings(self, api: Harness) -> None:
        script(api, CALLS, hang=True)
        answer = ok(await api.chat(tools=TOOLS, stop=["x}"]))["choices"][0]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "x}")
        assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":1,"b":"'
        answer = ok(await api.chat(tools=TOOLS, stop=['<tool_call>{"name":"now']))["choices"][0]
        assert (answer["finish_reason"], calls_of(answer["message"])) == ("tool_calls", MEANT[:1])

    async def test_each_choice_has_its_own(self, api: Harness) -> None:
        api.scripts(*(Script([[id_] for id_ in api.ids(text)], "stop") for text in (CALLS, "plain") * 2))
        answers = ok(await api.chat(tools=TOOLS, n=2))["choices"]
        assert calls_of(answers[0]["message"]) == MEANT
        assert answers[1]["message"]["content"] == "plain"
        chunks = events(await api.chat(tools=TOOLS, n=2, stream=True))
        assert (streamed_calls(chunks, 0), joined(chunks, 1)) == (MEANT, "plain")
        assert (finish(chunks, 0), finish(chunks, 1)) == (["tool_calls"], ["stop"])

    async def test_logprobs_and_token_ids_are_of_all_tokens(self, api: Harness) -> None:
        script(api, CALLS, 3)
        ids = [*api.ids(CALLS), 0]
        body = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
        answer = ok(await api.chat(**body))["choices"][0]
        assert (answer["token_ids"], len(answer["logprobs"]["content"])) == (ids, len(ids))
        choices = [c for chunk in events(await api.chat(stream=True, **body))[1:] for c in chunk["choices"]]
        assert [id_ for c in choices for id_ in c["token_ids"]] == ids
        assert sum(len(c["logprobs"]["content"]) for c in choices) == len(ids)

    async def test_marks_that_are_special_tokens(self) -> None:
        api = make(special("[TOOL_CALLS]", "[ARGS]", "[OTHER]"), tools="mistral")
        script(api, '[OTHER]Well.[TOOL_CALLS]add[ARGS]{"a": 1}')
        message = ok(await api.chat(tools=TOOLS))["choices"][0]["message"]
        assert (message["content"], calls_of(message)) == ("Well.", [("add", {"a": 1})])
        assert ok(await api.chat())["choices"][0]["message"]["content"] == 'Well.add{"a": 1}'

    @pytest.mark.parametrize(
        "tool", [{}, {"name": 5}, {"name": "f", "parameters": "x"}, {"name": "f", "parameters": [1]}]
    )
    async def test_malformed(self, api: Harness, tool: Any) -> None:
        assert "tools[0]" in refused(await api.chat(tools=[{"type": "function", "function": tool}]))["message"]

    @pytest.mark.parametrize("parameters", [None, {}, {"properties": 5}, {"properties": {"a": 5}},
                                            {"properties": {"a": {"type": 5, "anyOf": 6, "enum": 7}}}])  # fmt: skip
    @pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
    async def test_odd_schemas(self, parser: str, parameters: Any) -> None:
        api = make(tools=parser)
        script(api, "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>")
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        ok(await api.chat(tools=[tool]))

    async def test_every_parser_takes_any_text(self) -> None:
        for name in tool_parsers():
            api = make(tools=name)
            script(api, "Hello <|x|> [1] {2} ")
            assert ok(await api.chat(tools=TOOLS))["choices"][0]["message"]["content"] == "Hello <|x|> [1] {2} "


class TestReasoning:
    @pytest.mark.parametrize("more", [{}, {"stop": ["\n\nObservation:"]}])
    @pytest.mark.parametrize("step", [1, 3, 1000])
    async def test_parted(self, r1: Harness, more: dict[str, Any], step: int) -> None:
        script(r1, "<think>abc</think>def", step)
        answer = ok(await r1.chat(**more))["choices"][0]
        message = answer["message"]
        assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("abc", "abc", "def")
        assert answer["finish_reason"] == "stop"
        chunks = events(await r1.chat(stream=True, **more))
        assert (thought(chunks), thought(chunks, "reasoning_content"), joined(chunks)) == ("abc", "abc", "def")
        assert finish(chunks) == ["stop"]

    async def test_stop_within(self, r1: Harness) -> None:
        script(r1, "<think>abc</think>def", hang=True)
        answer = ok(await r1.chat(stop=["bc"]))["choices"][0]
        assert (answer["message"]["reasoning"], answer["message"]["content"]) == ("a", None)
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "bc")
        chunks = events(await r1.chat(stop=["bc"], stream=True))
        assert (thought(chunks), joined(chunks), finish(chunks)) == ("a", "", ["stop"])

    async def test_left_out(self, r1: Harness) -> None:
        script(r1, "<think>abc</think>def")
        message = ok(await r1.chat(include_reasoning=False))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (None, "def")
        chunks = events(await r1.chat(include_reasoning=False, stream=True))
        assert (thought(chunks), joined(chunks)) == ("", "def")
        assert refused(await make().chat(include_reasoning=False))["param"] == "include_reasoning"
        ok(await make().chat(include_reasoning=True))

    @pytest.mark.parametrize("step", [1, 2, 1000])
    async def test_tokens_are_counted(self, step: int) -> None:
        api = make(special("<think>", "</think>"), tools=None, reasoning="qwen3")
        script(api, "<think>abc</think>def", step)
        usage = ok(await api.chat())["usage"]
        inside = len(api.ids("<think>abc"))
        assert usage["completion_tokens_details"] == {"reasoning_tokens": inside}
        assert usage["completion_tokens"] == len(api.ids("<think>abc</think>def")) + 1
        options = {"include_usage": True}
        assert events(await api.chat(stream=True, stream_options=options))[-1]["usage"] == usage
        assert "completion_tokens_details" not in ok(await make().chat())["usage"]

    @pytest.mark.parametrize(
        ("end", "parted"), [("<think>\n", ("abc", "def")), ("<think></think>", (None, "abc</think>def"))]
    )
    async def test_prompts_that_begin_or_end_it(self, end: str, parted: tuple[str | None, str]) -> None:
        api = make(byte_level(CHAT_TEMPLATE + end), tools=None, reasoning="qwen3")
        script(api, "abc</think>def")
        message = ok(await api.chat())["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == parted

    async def test_messages_that_go_on(self, r1: Harness) -> None:
        script(r1, "bc</think>def")
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>a"}]
        body = {"messages": messages, "continue_final_message": True}
        message = ok(await r1.chat(**body))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("bc", "def")
        messages[1]["content"] = "Sure"
        script(r1, ", yes")
        assert ok(await r1.chat(**body))["choices"][0]["message"]["content"] == ", yes"
        assert ok(await r1.chat(echo=True, **body))["choices"][0]["message"]["content"] == "Sure, yes"
        assert joined(events(await r1.chat(echo=True, stream=True, **body))) == "Sure, yes"

    async def test_with_tools(self) -> None:
        api = make(reasoning="qwen3")
        script(api, f"<think>May I <tool_call>?</think>\n\n{CALLS}")
        message = ok(await api.chat(tools=TOOLS))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("May I <tool_call>?", "\n\nok")
        assert calls_of(message) == MEANT

    async def test_gpt_oss(self) -> None:
        marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")
        text = (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1}<|call|>'
        )
        for reasoning in ("openai_gptoss", None):
            api = make(special(*marks), tools="openai", reasoning=reasoning)
            script(api, text)
            answer = ok(await api.chat(tools=TOOLS))["choices"][0]
            message = answer["message"]
            assert (message["reasoning"], message["content"]) == ("Hm.", None)
            assert (calls_of(message), answer["finish_reason"]) == ([("add", {"a": 1})], "tool_calls")

    @pytest.mark.parametrize(
        ("template", "effort", "shown"),
        [
            ("{{ reasoning_effort }}", "high", "high"),
            ("{{ enable_thinking }}", "none", "False"),
            ("{{ thinking }}", "none", "False"),
            ("{{ enable_thinking }}", "low", None),
            ("x", "none", None),
            ("{{ reasoning_effort }}", "much", None),
        ],
    )
    async def test_effort(
        self, make_api: Callable[..., Harness], template: str, effort: str, shown: str | None
    ) -> None:
        api = make_api(tokenizer=byte_level(template))
        reply = await api.chat(reasoning_effort=effort)
        if shown is None:
            assert refused(reply)["param"] == "reasoning_effort"
        else:
            ok(reply)
            assert api.tokenizer.decode(api.service.adds[0].prompt_token_ids) == shown

    async def test_templates_see_it_under_both_names(self, make_api: Callable[..., Harness]) -> None:
        api = make_api(tokenizer=byte_level("{{ messages[0].reasoning }}{{ messages[0].reasoning_content }}"))
        for name in ("reasoning", "reasoning_content"):
            ok(await api.chat(messages=[{"role": "assistant", "content": "a", name: "b"}]))
            assert api.tokenizer.decode(api.service.adds[-1].prompt_token_ids) == "bb"


async def test_a_budget_of_reasoning_reaches_the_engine() -> None:
    tokenizer = special("<think>", "</think>")
    begin, end = (tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    api = make(tokenizer, tools=None, reasoning="qwen3")
    script(api, "<think>hm</think>Yes")
    await api.chat(thinking_token_budget=5)
    (limit,) = [add.sampling.thinking for add in api.service.adds]
    assert limit == Thinking(budget=5, inside=False, begin_ids=((begin,),), mark_ids=((end,),), end_ids=(end,))
    await api.chat()
    assert api.service.adds[-1].sampling.thinking is None
    for budget in (-1, 1.5, "3", True):
        assert refused(await api.chat(thinking_token_budget=budget))["param"] == "thinking_token_budget"
    error = refused(await make(tools=None).chat(thinking_token_budget=5))
    assert error["param"] == "thinking_token_budget"
    assert "--reasoning-parser" in error["message"]


@pytest.mark.option("reasoning-config")
async def test_marks_of_reasoning() -> None:
    """Without a parser they make one; with one, the end says what a spent budget says."""
    api = Harness(max_model_len=4096, reasoning_marks=("[R]", "[/R]"))
    script(api, "[R]hm[/R]Yes")
    body = ok(await api.chat(thinking_token_budget=2))
    assert (body["choices"][0]["message"]["reasoning"], body["choices"][0]["message"]["content"]) == ("hm", "Yes")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    limit = api.service.adds[-1].sampling.thinking
    assert limit.begin_ids == (tuple(api.ids("[R]")),)
    assert limit.end_ids == limit.mark_ids[0] == tuple(api.ids("[/R]"))

    api = Harness(
        tokenizer=special("<think>", "</think>"), max_model_len=4096, reasoning_parser="deepseek_r1",
        reasoning_marks=("", "Enough.</think>"),
    )  # fmt: skip
    script(api, "hm</think>Yes")
    ok(await api.chat(thinking_token_budget=2))
    limit = api.service.adds[-1].sampling.thinking
    assert limit.inside
    assert limit.end_ids == (*api.ids("Enough."), *limit.mark_ids[0])


async def test_a_budget_of_reasoning_elsewhere() -> None:
    """Token in, token out takes what the rendering of a chat says; beams, which rank freely, cannot."""
    api = make(special("<think>", "</think>"), tools=None, reasoning="qwen3")
    messages = [{"role": "user", "content": "a"}]
    rendered = ok(await api.post("/v1/chat/completions/render", messages=messages, thinking_token_budget=3))
    assert rendered["sampling_params"]["thinking_token_budget"] == 3
    ok(await api.post("/inference/v1/generate", **{**rendered, "stream": False, "stream_options": None}))
    await api.chat(messages=messages, thinking_token_budget=3)
    told, asked = (add.sampling.thinking for add in api.service.adds)
    assert told == asked
    for wrong in ("3", True, -1):
        error = refused(
            await api.post("/inference/v1/generate", token_ids=[1], sampling_params={"thinking_token_budget": wrong})
        )
        assert "thinking_token_budget" in error["message"]
    beams = await api.chat(messages=messages, thinking_token_budget=3, use_beam_search=True)
    assert refused(beams)["param"] == "thinking_token_budget"
