"""Values in JSON and in other notations, read piece by piece."""

import json
import random
import re
from typing import Any

import pytest

from rayllm.parsers.literals import JSON, PYTHON, Dialect, copy_value, json_of, unquoted
from rayllm.parsers.reader import Broken, Reader

from .samples import cuts

ODD = [
    "",
    "plain",
    "q\"uo'tes",
    "back\\slash \\n",
    "line\nbreak\ttab\r\x00\x1f",
    "龜🫠é\u2028",
    "</tool_call>",
    "{[(,:)]}",
]


def copied(pieces: list[str], dialect: Dialect = JSON) -> str:
    """What is emitted of a value, all of it or up to where it breaks."""
    reader, out = Reader(), []
    reading = copy_value(reader, out.append, dialect)
    try:
        for piece in pieces:
            reader.push(piece)
            next(reading)
        reader.end()
        next(reading)
    except (StopIteration, Broken):
        pass
    return "".join(out)


def any_value(draw: random.Random, depth: int = 3) -> Any:
    kind = draw.randrange(8 if depth else 6)
    if kind < 6:
        return [None, True, False, draw.randrange(-(10**20), 10**20), draw.random() * 1e-7, draw.choice(ODD)][kind]
    inner = [any_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return inner if kind == 6 else {draw.choice(ODD) + str(i): value for i, value in enumerate(inner)}


def test_json_and_python_mean_the_same() -> None:
    draw = random.Random(1)
    for _ in range(150):
        value = any_value(draw)
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
            assert copied(cuts(text, draw)) == text if text[0] in '[{"' else copied([text]) == text
            assert json.loads(copied([text], PYTHON)) == value
        assert json.loads(copied(cuts(repr(value), draw), PYTHON)) == value
        assert json.loads(json_of(repr(value)) or "") == value


@pytest.mark.parametrize(
    ("text", "out"),
    [
        ('{"a": 1,}', '{"a": 1}'),
        ("[1, 2, ]", "[1, 2 ]"),
        ('{"a": True, "b": None}', '{"a": true, "b": null}'),
        ('"line\nbreak"', '"line\\nbreak"'),
        ('"C:\\dir \\u00e9 \\u12 \\x"', '"C:\\\\dir \\u00e9 \\\\u12 \\\\x"'),
        ('"it\\\'s"', '"it\'s"'),
        ("{'a': 1}", "{"),
        ('{"a" 1}', '{"a"'),
        ('{"a": 1 2}', '{"a": 1'),
        ("[1}", "[1"),
        ("nul", ""),
        ("NaN", ""),
        ("01", ""),
        ("1e999", "1e999"),
    ],
)
def test_lenient_and_strict(text: str, out: str) -> None:
    assert copied([text]) == copied(list(text)) == out


@pytest.mark.parametrize(
    ("text", "out"),
    [
        ("(1, 'a', (2,))", '[1, "a", [2]]'),
        ("'\\x41\\u00e9\\U0001F600\\N'", '"\\u0041\\u00e9😀\\\\N"'),
        ("'\\U0000D800\\UFFFFFFFF'", '"\\ufffd\\ufffd"'),
        ("0x1F", "31"),
        ("1_000", "1000"),
        ("-.5", "-0.5"),
        ("1.", "1.0"),
        ("inf", ""),
        ("1e999", "1e999"),
        ("9" * 5000, "9" * 5000),
        ("0x" + "f" * 5000, ""),
        ("f(x)", ""),
    ],
)
def test_python(text: str, out: str) -> None:
    assert copied([text], PYTHON) == copied(list(text), PYTHON) == out


def test_json_of_takes_whole_values_only() -> None:
    assert json_of(" {'a': 1} ") == '{"a": 1}'
    for text in ("", "a", "1 2", "{'a': 1} b", "[1", "'open"):
        assert json_of(text) is None


def test_what_is_emitted_is_always_the_beginning_of_json() -> None:
    """Of any text, what was emitted can be completed: closed where it is open, it is sound."""
    draw = random.Random(2)
    for _ in range(400):
        text = "".join(
            draw.choice(['{"a":', "[", '"x"', "1", ",", "]", "}", " ", "true", "\\", "\n", "b"]) for _ in range(12)
        )
        assert _completable(copied(cuts(text, draw))), text


def _completable(text: str) -> bool:
    strings = re.sub(r'"(?:[^"\\]|\\.)*("|$)', '""', text)
    closing = "".join({"{": "}", "[": "]"}[char] for char in reversed(re.sub(r"[^\[{\]}]", "", _unclosed(strings))))
    for middle in ("", ":0", "0", ',"":0', '"":0'):
        try:
            json.loads(f"{strings}{middle}{closing}" or "0")
        except ValueError:
            continue
        return True
    return False


def _unclosed(text: str) -> str:
    brackets, before = re.sub(r"[^\[\]{}]", "", text), None
    while brackets != before:
        before, brackets = brackets, brackets.replace("[]", "").replace("{}", "")
    return brackets


def test_half_surrogate_pairs_become_replacement_characters() -> None:
    assert unquoted('"a\\ud83d"') == "a\ufffd"
    assert unquoted('"\\ud83e\\udee0"') == "🫠"
