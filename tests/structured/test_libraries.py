"""The other libraries, which compile in a process of their own."""

import json
import os
import time
from collections.abc import Callable, Iterator

import jsonschema
import pytest

from rayllm.config.engine import StructuredSettings
from rayllm.errors import RequestError
from rayllm.messages.structured import StructuredOutputs
from rayllm.structured.grammar import Vocabulary
from rayllm.structured.store import Grammars
from rayllm.structured.workshop import MAKING_S, in_a_fork
from tests.structured.conftest import END, Forms, add
from tests.structured.test_outputs import CHOICES, GBNF, LARK, PATTERNS, SCHEMAS, holds, json_of

pytestmark = pytest.mark.slow

Start = Callable[..., Forms]
LIBRARIES = ("xgrammar", "outlines")
NUMBER = {"type": "object", "properties": {"n": {"enum": [7, 42]}}, "required": ["n"], "additionalProperties": False}
TAGS = {"structures": [{"begin": "<f>", "schema": NUMBER, "end": "</f>"}], "triggers": ["<f"]}
FORMAT = {
    "type": "tag", "begin": "<f>", "end": "</f>",
    "content": {"type": "json_schema", "json_schema": NUMBER},
}  # fmt: skip


@pytest.fixture(scope="module", params=LIBRARIES)
def grammars(request: pytest.FixtureRequest, vocabulary: Vocabulary) -> Iterator[Grammars]:
    made = Grammars(StructuredSettings(request.param), (END,), lambda: vocabulary)
    made.prepare(StructuredOutputs(choice=("warm",))).result(60)
    yield made
    made.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_outputs_have_their_form(start: Start, library: str) -> None:
    runner = start(structured={"backend": library})
    # Which date is one, or how many decimals a number may have, they do not look at.
    forms = [json_of(schema) for schema in (SCHEMAS[0], SCHEMAS[1], SCHEMAS[3])]
    forms += [StructuredOutputs(regex=pattern) for pattern in PATTERNS[:3]]
    forms.append(StructuredOutputs(choice=CHOICES))
    if library == "xgrammar":
        forms += [StructuredOutputs(grammar=GBNF), StructuredOutputs(grammar=LARK)]
    outputs = runner.run([add(i, form) for i, form in enumerate(forms)])
    for form, ids in zip(forms, outputs, strict=True):
        assert ids[-1] == END, runner.text(ids)
        assert holds(form, runner.text(ids)), (form, runner.text(ids))
    runner.run([add(0, None, max_tokens=3)])


@pytest.mark.slow
def test_tags(start: Start) -> None:
    """In both notations, by whichever library has them."""
    runner = start()
    tag = StructuredOutputs(structural_tag={"type": "structural_tag", "format": FORMAT})
    (text,) = runner.texts(tag)
    jsonschema.validate(json.loads(text.removeprefix("<f>").removesuffix("</f>")), NUMBER)
    for backend in ("guidance", "xgrammar"):
        prompted = StructuredOutputs(structural_tag=TAGS, backend=backend)
        less = runner._tokenizer.encode("<", False)[0]
        for text in runner.texts(*[prompted] * 4, logit_bias={less: 8.0}, max_tokens=60):
            inside = [part.partition("</f>")[0] for part in text.split("<f>")[1:] if "</f>" in part]
            for part in inside:
                jsonschema.validate(json.loads(part), NUMBER)


def test_what_is_wrong_is_said(grammars: Grammars) -> None:
    schemas = ({"$ref": "#/nowhere"}, {"not": {"type": "string"}})
    for wrong in (StructuredOutputs(regex="("), *(StructuredOutputs(json=schema) for schema in schemas)):
        with pytest.raises(RequestError, match=f"structured_outputs: this {wrong.form} cannot be used: ."):
            grammars.prepare(wrong).result(5)


@pytest.mark.parametrize("regex", ["((a{1,1000}){1,1000}){1,1000}", "(a|b)*a(a|b){22}", "(" * 9000 + "a" + ")" * 9000])
def test_hostile_forms_are_answered_soon(grammars: Grammars, regex: str) -> None:
    began = time.perf_counter()
    error = grammars.prepare(StructuredOutputs(regex=regex)).exception(5)
    assert time.perf_counter() - began < 1.5
    assert error is None or isinstance(error, RequestError)
    assert grammars.prepare(StructuredOutputs(choice=("next",))).result(5)


def test_a_fork_that_goes_wrong_harms_nobody() -> None:
    began = time.perf_counter()
    assert in_a_fork(lambda: b"made") == b"made"
    assert in_a_fork(lambda: 1 / 0) == "division by zero"
    assert "crash" in in_a_fork(lambda: os._exit(3))
    assert "MemoryError" in in_a_fork(lambda: b"x" * (100 << 30))
    assert "s to compile" in in_a_fork(lambda: time.sleep(9))
    assert time.perf_counter() - began < 4 * MAKING_S + 2
