"""Whatever JSON schema a library takes, the outputs that end are instances of it; the schemas are one by keyword, and
those of the official JSON-Schema-Test-Suite, which the source archive of the package jsonschema holds.
"""

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator

import jsonschema
import pytest

from rayllm import LLM, SamplingParams, StructuredOutputs
from rayllm.errors import RequestError
from rayllm.structured.grammar import GrammarError, Vocabulary
from rayllm.structured.guidance import Guidance
from rayllm.structured.schemas import check_kept, check_seen
from tests.models import smollm2_gguf

ARCHIVE = "jsonschema==4.26.0"
TAKEN = {
    "type": {"type": ["integer", "null", "boolean"]},
    "enum": {"enum": ["a", 1, None, {"b": [2]}]},
    "const": {"const": {"a": [1, "é"]}},
    "maxLength": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^a[bc]{1,3}$"},
    "format": {"type": "string", "format": "date"},
    "minimum": {"type": "integer", "minimum": 10, "exclusiveMaximum": 20},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [1]}], "items": False,
                    "minItems": 2},
    "maxItems": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "required": {"properties": {"a": {"type": "boolean"}, "b": {"enum": [1]}}, "required": ["b"],
                 "additionalProperties": False, "type": "object"},
    "patternProperties": {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
                          "additionalProperties": False, "maxProperties": 2},
    "minProperties": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1,
                      "maxProperties": 2},
    "anyOf": {"anyOf": [{"type": "boolean"}, {"enum": ["a", "b"]}]},
    "oneOf": {"oneOf": [{"type": "boolean"}, {"enum": ["a", "b"]}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}}},
}  # fmt: skip
DROPPED = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}},
    "contains": {"type": "array", "contains": {"const": 1}},
    "uniqueItems": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#a", "$defs": {"b": {"$dynamicAnchor": "a", "type": "integer"}}},
}
"""By a keyword that is not kept to."""
ONLY_XGRAMMAR_HAS = ("propertyNames", "unevaluatedProperties")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The suite's schemas of draft 2020-12."""
    folder = tmp_path_factory.mktemp("suite")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema", ARCHIVE]
    if subprocess.run([*command, "--dest", str(folder)], timeout=300).returncode:
        pytest.skip("the suite cannot be fetched")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    files = sorted(folder.glob("*/json/tests/draft2020-12/*.json"))
    schemas = [case["schema"] for file in files for case in json.loads(file.read_text())]
    return [schema for schema in schemas if isinstance(schema, dict)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(smollm2_gguf()), max_model_len=256, max_num_seqs=32, kv_cache_memory_bytes="256M") as made:
        yield made


def check(llm: LLM, schemas: list[dict], backend: str = "guidance", samples: int = 2) -> int:
    """How many outputs ended, each an instance of its schema."""
    asked = [StructuredOutputs(json=schema, backend=backend, disable_any_whitespace=True) for schema in schemas]
    sampling = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=60, structured_outputs=one)
        for one in asked for seed in range(samples)
    ]  # fmt: skip
    outputs = [result.outputs[0] for result in llm.generate(["Here is some JSON: "] * len(sampling), sampling)]
    ended = 0
    for output, one in zip(outputs, sampling, strict=True):
        if output.finish_reason == "stop":
            ended += 1
            schema = one.structured_outputs.json
            jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
    return ended


def taken_of(llm: LLM, schemas: list[dict]) -> list[dict]:
    """Those that the server would admit."""
    taken = []
    for schema in schemas:
        one = StructuredOutputs(json=schema, disable_any_whitespace=True)
        try:
            llm.generate(["a"], SamplingParams(max_tokens=1, structured_outputs=one))
        except RequestError:
            continue
        taken.append(schema)
    return taken


@pytest.mark.smollm2
@pytest.mark.slow
def test_a_schema_of_each_keyword_gives_instances(llm: LLM) -> None:
    assert check(llm, list(TAKEN.values())) > len(TAKEN)


@pytest.mark.long
@pytest.mark.smollm2
def test_the_suites_schemas_give_instances(llm: LLM, suite: list[dict]) -> None:
    taken = taken_of(llm, suite)
    assert len(taken) > 150
    # Of schemas that take anything, most outputs are not at an end yet.
    assert check(llm, taken) > len(taken) / 2


def test_a_property_may_be_named_as_a_keyword() -> None:
    check_kept({"properties": {"not": {"enum": [{"if": 1}]}}, "uniqueItems": False}, "xgrammar")
    with pytest.raises(GrammarError, match="'contains'"):
        check_kept({"$defs": {"a": {"anyOf": [{"contains": {}}]}}}, "xgrammar")


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"minimum": 3}, "'minimum' only beside 'type'"),
        ({"properties": {"a": {"maximum": 3}}}, "'maximum' only beside 'type'"),
        ({"multipleOf": 3}, "'multipleOf' only beside 'type'"),
        ({"required": ["a"]}, "'required' only beside 'type'"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}], "minimum": 3}, "'minimum' beside 'anyOf'"),
        ({"$defs": {"a": {"anyOf": [{"type": "object"}], "properties": {"b": {}}}}}, "'properties' beside 'anyOf'"),
        ({"type": "array", "items": {"type": "integer", "oneOf": [{"minimum": 3}]}}, "'type' beside 'oneOf'"),
        ({"allOf": [{"type": "integer"}], "maximum": 3}, "'maximum' beside 'allOf'"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, r"'minimum' beside '\$ref'"),
        ({"enum": [1, "a"], "type": "integer"}, "'type' beside 'enum'"),
        ({"unevaluatedProperties": False}, "'unevaluatedProperties' only beside 'type'"),
        ({"allOf": [{"type": "integer"}, {"type": "integer"}]}, "'allOf' of several"),
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, "'required' of names"),
        ({"type": "number", "multipleOf": 0.5}, "'multipleOf' of numbers"),
        ({"type": "integer", "multipleOf": 2, "minimum": 0}, "'multipleOf' beside one limit"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "lengths beside 'pattern'"),
    ],
)
def test_xgrammar_gets_no_keyword_that_it_would_pass_over(schema: dict, named: str) -> None:
    with pytest.raises(GrammarError, match=f"{named}.*guidance"):
        check_seen(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {}, {"title": "a", "description": "b", "default": 1}, {"type": "integer", "minimum": 3},
        {"type": ["integer", "null"], "minimum": 3}, {"enum": [1, 2], "type": "integer"},
        {"const": "a", "type": ["string", "null"]},
        {"properties": {"minimum": {"type": "string"}}, "required": ["minimum"]},
        {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}], "default": None, "title": "a"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [{"minimum": 3}]}}, "description": "b"},
        {"items": {"type": "integer"}, "minItems": 1}, True,
    ],
)  # fmt: skip
def test_others_it_gets(schema: dict | bool) -> None:
    check_seen(schema)


def test_what_cannot_be_kept_to_is_refused_by_its_keyword(vocabulary: Vocabulary) -> None:
    guidance = Guidance(vocabulary)
    for keyword, schema in DROPPED.items():
        with pytest.raises(GrammarError, match=r"\$dynamic" if keyword == "$dynamicRef" else keyword):
            guidance.compile(StructuredOutputs(json=schema))
        if keyword not in ONLY_XGRAMMAR_HAS:
            with pytest.raises(GrammarError, match=re.escape(repr(keyword))):
                check_kept(schema, "xgrammar")
