"""Calls that a grammar forces."""

import json
import random

import pytest

from rayllm.parsers.forced import NamedCall, RequiredCalls

from .samples import NESTED, TOOLS, Parsed, cuts, parse


@pytest.mark.parametrize("indent", [None, 2])
def test_required(indent: int | None) -> None:
    calls = [{"name": "add", "parameters": NESTED}, {"name": "now", "parameters": {}}]
    text, draw = json.dumps(calls, indent=indent), random.Random(1)
    whole = parse(RequiredCalls(TOOLS), [text])
    assert (whole.calls, whole.content, whole.ended) == ([("add", NESTED), ("now", {})], "", [0, 1])
    for i in range(len(text)):
        assert parse(RequiredCalls(TOOLS), [text[:i], text[i:]]) == whole
        assert parse(RequiredCalls(TOOLS), cuts(text[:i], draw)) == parse(RequiredCalls(TOOLS), [text[:i]])


def test_named() -> None:
    def parsed(*pieces: str) -> Parsed:
        return parse(NamedCall(TOOLS, "add"), pieces)

    text = json.dumps(NESTED)
    whole = parsed(text)
    assert (whole.calls, whole.content, whole.ended) == ([("add", NESTED)], "", [0])
    for i in range(len(text)):
        assert parsed(text[:i], text[i:]) == whole
    cut = parsed('{"a": 3, ')
    assert (cut.names, cut.arguments, cut.ended, cut.content) == (["add"], ['{"a": 3'], [], "")
    assert (parsed("").names, parsed("no").content) == ([], "no")
    assert (parsed("{} more").arguments, parsed("{} more").content) == (["{}"], "more")
