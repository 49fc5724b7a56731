"""Fields that ask for a form of the output, and what becomes of them."""

import json

import pytest

from rayllm.messages.structured import DEEPEST, LONGEST, StructuredOutputs, depth

from .conftest import ok, refused

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": 2**70}}}
TAGS = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}
FORMAT, OUTPUTS = "response_format", "structured_outputs"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({FORMAT: {"type": "text"}}, None),
        ({FORMAT: {"type": "json_object"}}, {"json_object": True, "field": FORMAT}),
        ({FORMAT: {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
         {"json": json.dumps(SCHEMA), "field": FORMAT}),
        ({FORMAT: {"type": "structural_tag", **TAGS}},
         {"structural_tag": json.dumps({"type": "structural_tag", **TAGS}), "field": FORMAT}),
        ({OUTPUTS: {"json": SCHEMA, "disable_any_whitespace": True, "backend": "guidance"}},
         {"json": json.dumps(SCHEMA), "disable_any_whitespace": True, "backend": "guidance"}),
        ({OUTPUTS: {"json": json.dumps(SCHEMA), "whitespace_pattern": " ?", "regex": None}},
         {"json": json.dumps(SCHEMA), "whitespace_pattern": " ?"}),
        ({OUTPUTS: {"regex": "a+", "disable_fallback": True}}, {"regex": "a+"}),
        ({OUTPUTS: {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({OUTPUTS: {"grammar": "start: X"}}, {"grammar": "start: X"}),
        ({OUTPUTS: {"json_object": True}}, {"json_object": True}),
        ({OUTPUTS: {"structural_tag": json.dumps(TAGS)}}, {"structural_tag": json.dumps(TAGS)}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
         {"json": json.dumps(SCHEMA), "whitespace_pattern": " ", "field": "guided_json"}),
        ({"guided_regex": "a", "guided_decoding_backend": "xgrammar"},
         {"regex": "a", "backend": "xgrammar", "field": "guided_regex"}),
        ({"guided_choice": ["a"]}, {"choice": ("a",), "field": "guided_choice"}),
        ({"guided_grammar": "start: X"}, {"grammar": "start: X", "field": "guided_grammar"}),
        ({"structural_tag": TAGS}, {"structural_tag": json.dumps(TAGS), "field": "structural_tag"}),
    ],
)  # fmt: skip
async def test_fields_ask_for_a_form(api, body, wanted):
    ok(await api.chat(**body))
    ok(await api.complete(**body))
    for add in api.service.adds:
        assert add.sampling.structured_outputs == (None if wanted is None else StructuredOutputs(**wanted))


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({FORMAT: {"type": "yaml"}}, FORMAT, "json_schema"),
        ({FORMAT: {}}, FORMAT, "type"),
        ({FORMAT: {"type": "json_schema"}}, FORMAT, "schema"),
        ({FORMAT: {"type": "json_schema", "json_schema": {"name": "x", "schema": [1]}}}, FORMAT, "schema"),
        ({FORMAT: {"type": "json_schema", "json_schema": {"schema": {}, "loose": 1}}}, FORMAT, "loose"),
        ({FORMAT: {"type": "json_object", "schema": {}}}, FORMAT, "schema"),
        ({OUTPUTS: {}}, OUTPUTS, "one of"),
        ({OUTPUTS: {"json_object": False}}, OUTPUTS, "one of"),
        ({OUTPUTS: {"regex": "a", "choice": ["b"]}}, OUTPUTS, "regex and choice"),
        ({OUTPUTS: {"regex": 5}}, OUTPUTS, "regex"),
        ({OUTPUTS: {"after_ids": [1], "regex": "a"}}, OUTPUTS, "after_ids"),
        ({OUTPUTS: {"choice": []}}, OUTPUTS, "choice"),
        ({OUTPUTS: {"choice": ["a", ""]}}, OUTPUTS, "empty"),
        ({OUTPUTS: {"choice": ["a"] * 5000}}, OUTPUTS, "5000"),
        ({OUTPUTS: {"regex": "a" * 2**20}}, OUTPUTS, str(LONGEST["regex"])),
        ({OUTPUTS: {"json": "{"}}, OUTPUTS, "not JSON"),
        ({OUTPUTS: {"json": "[]"}}, OUTPUTS, "object"),
        ({OUTPUTS: {"json": '{"a":' * 200 + "1" + "}" * 200}}, OUTPUTS, str(DEEPEST)),
        ({OUTPUTS: {"regex": "a", "whitespace_pattern": " "}}, OUTPUTS, "JSON"),
        ({OUTPUTS: {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}}, OUTPUTS, "contradicts"),
        ({OUTPUTS: {"json": {}, "backend": "lm-format-enforcer"}}, OUTPUTS, "backend"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude"),
        ({FORMAT: {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "exclude"),
    ],
)
async def test_what_is_wrong_is_named(api, body, field, says):
    error = refused(await api.chat(**body))
    assert error["param"] == field
    assert field in error["message"]
    assert says in error["message"]
    assert len(error["message"]) < 400
    assert not api.service.adds


def test_depth():
    assert [depth(value) for value in (1, [], {"a": [1, {"b": 2}]}, [[]] * 3)] == [0, 1, 3, 2]
