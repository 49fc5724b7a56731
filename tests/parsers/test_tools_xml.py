"""Texts of parameters, and what they mean by the schema of a tool."""

from typing import Any

import pytest

from rayllm.parsers.tools_xml import kinds_of, value_of


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}, 5]}, {"string", "null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": ["a", 1]}, set()),
        ({}, set()),
        ({"type": 5, "oneOf": 6, "enum": 7}, set()),
    ],
)
def test_kinds(schema: dict[str, Any], kinds: set[str]) -> None:
    assert kinds_of(schema) == kinds


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("5", {"integer"}, "5"),
        ("5", {"string"}, '"5"'),
        ("5", {"string", "null"}, '"5"'),
        ("null", {"string", "null"}, "null"),
        ("None", {"null", "integer"}, "null"),
        (" 5\n", set(), "5"),
        ("007", set(), '"007"'),
        ("True", {"boolean"}, "true"),
        ("yes", {"boolean"}, '"yes"'),
        ("{'a': [1]}", {"object"}, '{"a": [1]}'),
        ('{"a": ', {"object"}, '"{\\"a\\": "'),
        ('"x"', set(), '"\\"x\\""'),
        ("", {"integer"}, '""'),
    ],
)
def test_values(text: str, kinds: set[str], value: str) -> None:
    assert value_of(text, frozenset(kinds)) == value
