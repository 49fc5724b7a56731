"""What is compiled, kept and refused."""

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from rayllm.config.engine import StructuredSettings
from rayllm.errors import Overloaded, RequestError
from rayllm.messages.structured import StructuredOutputs
from rayllm.structured import store
from rayllm.structured.grammar import GrammarError, Vocabulary
from rayllm.structured.store import Grammars
from tests.structured.conftest import END, VOCAB

Make = Callable[..., Grammars]


@pytest.fixture
def make(vocabulary: Vocabulary) -> Iterator[Make]:
    made: list[Grammars] = []

    def make(load: Callable[[], Vocabulary] = lambda: vocabulary, **settings: object) -> Grammars:
        made.append(Grammars(StructuredSettings(**settings), (END,), load))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def word(text: str) -> StructuredOutputs:
    return StructuredOutputs(choice=(text,))


def test_a_grammar_is_compiled_once(make: Make) -> None:
    grammars = make()
    first = grammars.prepare(word("a")).result(5)
    assert grammars.prepare(word("a")).result(0) is first
    assert grammars.get(word("a")) is first
    assert grammars.prepare(word("b")).result(5) is not first


def test_few_are_kept_beside_those_in_use(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_KEPT", 3)
    grammars = make()
    held = grammars.prepare(word("held")).result(5)
    for i in range(10):
        grammars.prepare(word(f"w{i}")).result(5)
    assert grammars.kept == 3
    assert grammars.get(word("held")) is held
    gc.collect()
    assert len(grammars._live) == 4
    monkeypatch.setattr(store, "MOST_KEPT_TEXT", 1000)
    grammars.prepare(word("long" * 300)).result(5)
    assert grammars.kept == 0


HOSTILE = {
    "repeats": StructuredOutputs(regex="((a{1,1000}){1,1000}){1,1000}"),
    "backtracking": StructuredOutputs(regex="(x+x+)+y"),
    "exponential": StructuredOutputs(regex="(a|b)*a(a|b){25}"),
    "gaps": StructuredOutputs(regex="(.*a.{20}b.*c.{20}){10}"),
    "unicode": StructuredOutputs(regex=r"(\p{L}{1,500}\d){1,200}"),
    "deep regex": StructuredOutputs(regex="(" * 10_000 + "a" + ")" * 10_000),
    "many alternatives": StructuredOutputs(regex="a|" * 16_000 + "b"),
    "deep grammar": StructuredOutputs(grammar="start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "ambiguous": StructuredOutputs(grammar='start: a\na: a a | "x" |'),
    "endless": StructuredOutputs(grammar="start: start"),
    "itself": StructuredOutputs(json={"$ref": "#"}),
    "elsewhere": StructuredOutputs(json={"$ref": "http://127.0.0.1:9/schema"}),
    "file": StructuredOutputs(json={"$ref": "file:///etc/passwd"}),
    "many values": StructuredOutputs(json={"enum": [f"v{i}" for i in range(15_000)]}),
    "many properties": StructuredOutputs(
        json={"type": "object", "properties": {f"p{i}": {"pattern": "^a{1,100}b$"} for i in range(2000)}}
    ),
    "products": StructuredOutputs(
        json={"allOf": [{"oneOf": [{"properties": {f"a{i}{j}": {"type": "integer"}}} for j in range(6)]}
                        for i in range(8)]}
    ),
    "intersections": StructuredOutputs(
        json={"type": "string", "allOf": [{"pattern": p} for p in ("^(a|b)*a(a|b){12}$", "^(a|b)*b(a|b){13}$")]}
    ),
    "large bounds": StructuredOutputs(json={"type": "array", "minItems": 10**9, "maxItems": 10**18}),
    "odd schema": StructuredOutputs(json={"type": 7, "properties": [], "items": "x"}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_are_refused_or_served_soon(make: Make, name: str) -> None:
    """Others wait for none of it: neither for the interpreter while it compiles, nor long for a mask."""
    grammars = make()
    grammars.prepare(word("warm")).result(10)
    began = time.perf_counter()
    future = grammars.prepare(HOSTILE[name])
    error = future.exception(5)
    assert time.perf_counter() - began < 1
    if error is not None:
        assert isinstance(error, RequestError)
        assert error.param == "structured_outputs"
        assert len(str(error)) < 500
        return
    matcher = future.result().matcher()
    bits, rng = np.zeros(-(-VOCAB // 32), np.int32), np.random.default_rng(0)
    worst = 0.0
    try:
        for _ in range(100):
            began = time.perf_counter()
            matcher.fill(bits)
            worst = max(worst, time.perf_counter() - began)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), count=VOCAB, bitorder="little"))
            allowed = allowed[allowed != END]
            if not len(allowed):
                break
            matcher.consume(int(rng.choice(allowed)))
    except GrammarError:
        pass
    assert worst < 0.2


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (StructuredOutputs(regex="("), "unclosed group"),
        (StructuredOutputs(json={"type": "objec"}), "objec"),
        (StructuredOutputs(grammar="start: missing"), "missing"),
        (StructuredOutputs(grammar='root ::= "a'), "GBNF"),
        (StructuredOutputs(structural_tag={"structures": [], "triggers": ["<"]}), "structures"),
        (StructuredOutputs(structural_tag={"structures": [{"begin": "x"}], "triggers": ["<"]}), "triggers"),
        (StructuredOutputs(regex="a", field="guided_regex", backend="nonsense"), "nonsense"),
    ],
)
def test_what_is_wrong_is_said(make: Make, asked: StructuredOutputs, says: str) -> None:
    grammars = make(backend="guidance")
    with pytest.raises(RequestError, match=says) as caught:
        grammars.prepare(asked).result(5)
    assert caught.value.param == asked.field
    assert asked.field in str(caught.value)
    assert not grammars._pending


REF = {"$ref": "#/$defs/A"}
LOOPS = {
    "itself": {"$ref": "#"},
    "two": {**REF, "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"allOf": [REF]}}},
    "inside": {"type": "object", "properties": {"a": REF}, "required": ["a"], "$defs": {"A": REF}},
    "optional": {"type": "object", "properties": {"a": REF}, "$defs": {"A": {"anyOf": [{"$ref": "#/%24defs/A"}]}}},
    "list": {"items": {"$ref": "#/$defs/a~1b/0"}, "$defs": {"a/b": [{"$ref": "#/$defs/a~1b/0"}]}},
}


@pytest.mark.parametrize("name", LOOPS)
def test_references_that_lead_to_themselves_are_refused(make: Make, name: str) -> None:
    """And not found out in the middle of an output."""
    grammars = make()
    tags = {"structures": [{"begin": "<a>", "schema": LOOPS[name], "end": "</a>"}], "triggers": ["<"]}
    for asked in (StructuredOutputs(json=LOOPS[name]), StructuredOutputs(structural_tag=tags)):
        with pytest.raises(RequestError, match="leads to itself") as caught:
            grammars.prepare(asked).result(5)
        assert caught.value.param == "structured_outputs"


def test_recursive_values_are_no_loop(make: Make) -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}
    named = {"properties": {"$ref": {"enum": [{"$ref": "#"}]}}}
    for schema in ({"$ref": "#/$defs/N", "$defs": {"N": node}}, named):
        make().prepare(StructuredOutputs(json=schema)).result(5)


def test_forms_of_no_output_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever library compiled them: before the request is admitted."""

    class Nothing:
        complete = False

        def matcher(self) -> "Nothing":
            return self

        def fill(self, bits: np.ndarray) -> None:
            bits.fill(0)

    class Library:
        def compile(self, asked: StructuredOutputs) -> Nothing:
            return Nothing()

        def close(self) -> None:
            pass

    monkeypatch.setattr(store, "build_backend", lambda name, vocabulary: Library())
    with pytest.raises(RequestError, match="cannot be used: no token of this model can follow"):
        make().prepare(word("a")).result(5)


def test_a_crowd_is_turned_away(make: Make, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_PENDING", 3)
    gate = threading.Event()

    def load() -> Vocabulary:
        gate.wait(5)
        return vocabulary

    grammars = make(load)
    futures = [grammars.prepare(word(text)) for text in ("a", "b", "c")]
    assert grammars.prepare(word("a")) is futures[0]
    with pytest.raises(Overloaded):
        grammars.prepare(word("d"))
    gate.set()
    assert all(future.result(5) for future in futures)
    grammars.prepare(word("d")).result(5)


def test_a_server_without_tokenizer_or_end_says_so(make: Make, facts) -> None:
    grammars = make(lambda: Vocabulary.load(None, facts))
    with pytest.raises(RequestError, match="no tokenizer"):
        grammars.prepare(word("a")).result(5)
    with pytest.raises(GrammarError, match="no end token"):
        Vocabulary.load(facts.path, replace(facts, eos_token_ids=()))


def test_settings_of_the_server_and_of_the_request(make: Make) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})

    def takes(grammars: Grammars, text: str, **asked: object) -> bool:
        matcher = grammars.prepare(StructuredOutputs(json=schema, **asked)).result(5).matcher()
        bits = np.zeros(-(-VOCAB // 32), np.int32)
        try:
            for byte in text.encode():
                matcher.fill(bits)
                matcher.consume(grammars._vocabulary.pieces.index(bytes([byte])))
        except GrammarError:
            return False
        return matcher.complete

    free, strict = make(), make(disable_any_whitespace=True, disable_additional_properties=True)
    assert takes(free, '{ "a": 1,\n"b": [] }')
    assert takes(strict, '{"a":1}')
    assert not takes(strict, '{"a": 1}')
    assert not takes(strict, '{"a":1,"b":[]}')
    assert takes(strict, '{"a": 1}', disable_any_whitespace=False)
    assert takes(strict, '{"a":1,"b":[]}', disable_additional_properties=False)
    assert not takes(free, '{"a": 1}', disable_any_whitespace=True)
    assert takes(free, '{"a":  1}', whitespace_pattern=" {2}")
    assert not takes(free, '{"a": 1}', whitespace_pattern=" {2}")
