"""Every tool parser on samples of its format, in every split, cut short, damaged, and on garbage."""

import random
import re

import pytest

from rayllm.parsers.registry import tool_parsers

from .samples import SAMPLES, TOOLS, Parsed, Sample, cuts, parse

EACH = [pytest.param(name, sample, id=f"{name}-{i}") for name in SAMPLES for i, sample in enumerate(SAMPLES[name])]
CANARY = "zq9"


def parsed(name: str, pieces: list[str]) -> Parsed:
    return parse(tool_parsers()[name](TOOLS), pieces)


def test_every_parser_has_samples() -> None:
    ours = {parser for parser in tool_parsers().values() if parser.__module__.startswith("rayllm.")}
    assert {tool_parsers()[name] for name in SAMPLES} == ours


@pytest.mark.parametrize(("name", "sample"), EACH)
def test_meaning(name: str, sample: Sample) -> None:
    out = parsed(name, [sample.text])
    assert (out.calls, out.content) == (list(sample.calls), sample.content)
    assert out.ended == list(range(len(sample.calls)))


@pytest.mark.parametrize(("name", "sample"), EACH)
def test_every_split_in_two(name: str, sample: Sample) -> None:
    whole = parsed(name, [sample.text])
    for i in range(len(sample.text)):
        assert parsed(name, [sample.text[:i], sample.text[i:]]) == whole, i


@pytest.mark.parametrize(("name", "sample"), EACH)
def test_random_splits_into_many(name: str, sample: Sample) -> None:
    whole, draw = parsed(name, [sample.text]), random.Random(5)
    assert parsed(name, list(sample.text)) == whole
    for _ in range(10):
        assert parsed(name, cuts(sample.text, draw)) == whole


@pytest.mark.parametrize(("name", "sample"), EACH)
def test_cut_short(name: str, sample: Sample) -> None:
    """Calls of a cut answer are the first of the whole one, and no word is lost."""
    whole = parsed(name, [sample.text])
    words = set(re.findall(r"\w{3,}", "\n".join([whole.content, *whole.names, *whole.arguments])))
    draw = random.Random(6)
    for i in range(draw.randrange(5), len(sample.text), 5):
        text = sample.text[:i]
        out = parsed(name, cuts(text, draw))
        assert out == parsed(name, [text])
        assert whole.names[: len(out.names)] == out.names
        for k in out.ended:
            assert out.arguments[k] == whole.arguments[k]
        assert all(word in out.all_text for word in words if word in text), text


@pytest.mark.parametrize(("name", "sample"), EACH)
def test_damaged(name: str, sample: Sample) -> None:
    """A word put anywhere into an answer is shown somewhere."""
    draw = random.Random(7)
    for i in range(draw.randrange(7), len(sample.text) + 1, 7):
        text = sample.text[:i] + CANARY + sample.text[i:]
        out = parsed(name, [text])
        assert CANARY in out.all_text, text
        assert parsed(name, cuts(text, draw)) == out


@pytest.mark.parametrize("name", SAMPLES)
def test_garbage(name: str) -> None:
    """Marks, brackets and words in any order: nothing is raised, and each word is shown."""
    draw = random.Random(name)
    parser = tool_parsers()[name]
    marks = [*parser.openers, *parser.markers, *re.findall(r"<[^<>]*>|[{}\[\](),:=\"'\n ]|\w+", SAMPLES[name][1].text)]
    for _ in range(150):
        pieces = [draw.choice(marks) for _ in range(draw.randrange(1, 25))]
        words = [f"zq{k}x" for k in range(3)]
        for word in words:
            pieces.insert(draw.randrange(len(pieces) + 1), word)
        text = "".join(pieces)
        out = parsed(name, [text])
        assert parsed(name, cuts(text, draw)) == out
        assert all(word in out.all_text for word in words), text


def test_other_keys_of_a_call_are_left_out() -> None:
    out = parsed("hermes", ['<tool_call>{"why": "because", "name": "now", "arguments": {}, "x": [1]}</tool_call>'])
    assert (out.calls, out.content) == ([("now", {})], "")


def test_texts_that_are_marked_as_such_may_hold_marks() -> None:
    text = '<function name="weather"><param name="city"><![CDATA[a </param></function>]]> </param></function>'
    assert parsed("minicpm5", [text]).calls == [("weather", {"city": "a </param></function>"})]


def test_the_name_before_a_call_is_shown_where_it_is_another() -> None:
    out = parsed("inkling", ['then<|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|>'])
    assert (out.calls, out.content) == ([("now", {})], "then")


def test_elements_nested_too_deeply_are_no_call() -> None:
    mark = "]<]minimax[>["
    text = f'{mark}<tool_call>{mark}<invoke name="add">' + f"{mark}<item>" * 5000
    out = parsed("minimax_m3", [text])
    assert (out.names, out.ended) == (["add"], [])
    assert out.content.endswith("<item>")


def test_ids() -> None:
    """Made where there are none, kept where the model gives them, and of the form that Mistral's templates want."""
    made = parsed("hermes", ['<tool_call>{"name": "now"}</tool_call>']).ids
    assert re.fullmatch(r"call_[0-9a-f]{24}", made[0])
    call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    first, second = parsed("kimi_k2", [call + call]).ids
    assert first == "functions.now:0" != second
    assert re.fullmatch(r"[A-Za-z0-9]{9}", parsed("mistral", ["[TOOL_CALLS]now[ARGS]{}"]).ids[0])
    assert parsed("mistral", ["[TOOL_CALLS]now[CALL_ID]abcdefgh1[ARGS]{}"]).ids == ["abcdefgh1"]
    assert parsed("mistral", ['[TOOL_CALLS][{"name": "now", "id": "abcdefgh2"}]']).ids == ["abcdefgh2"]


@pytest.mark.parametrize("name", SAMPLES)
def test_deep_nesting_and_long_texts(name: str) -> None:
    opening = (*tool_parsers()[name].openers, "<|channel|>commentary to=functions.add<|message|>")[0]
    for middle in ("[" * 1500, '{"name": "add", "arguments": ' + '{"a":' * 1500, "add(a=" + "[" * 1500, "\\" * 1500):
        text = opening + middle
        assert parsed(name, [text]) == parsed(name, [text[:300], text[300:]])
