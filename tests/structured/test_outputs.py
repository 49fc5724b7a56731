"""Outputs keep to their form on a random model at the highest temperature, whatever happens to their requests."""

import json
import random
import re
from collections.abc import Callable

import jsonschema
import msgspec
import numpy as np
import pytest

from rayllm.api.forced import forced_calls
from rayllm.messages.engine import Add
from rayllm.messages.structured import StructuredOutputs
from rayllm.structured.grammar import Vocabulary
from rayllm.structured.guidance import Guidance
from rayllm.structured.row import RowGrammar
from rayllm.worker.batch import Batch
from rayllm.worker.sampler import Sampler
from tests.api.test_forced import NAMED, POINT, TOOLS
from tests.structured.conftest import END, PROMPT, VOCAB, Forms, add

Start = Callable[..., Forms]
SHORT = {"type": "string", "maxLength": 4}
SCHEMAS = [
    {"type": "object", "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["red", "green", 3, None, True]}, "minItems": 1, "maxItems": 5},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": "café"}]},
    {"type": "object", "properties": {"at": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
     "required": ["at"], "additionalProperties": False,
     "$defs": {"point": {"type": "array", "prefixItems": [{"enum": [1, 2]}, {"enum": [3, 4]}], "minItems": 2,
                         "maxItems": 2, "items": False}}},
    {"type": "object", "properties": {"kind": {"const": "a"}, "when": {"type": "string", "format": "date"}},
     "required": ["kind", "when"], "additionalProperties": False},
    {"type": "number", "minimum": -1.5, "maximum": 1.5, "multipleOf": 0.5},
]  # fmt: skip
PATTERNS = [r"[a-z]{3,5}@[a-z]{1,9}\.(com|org)", r"(ab|cd){2,6}", r"\d{3}-\d{2}", "café|龜+🫠?"]
CHOICES = ("yes", "no", 'a "quoted" \\ one\n', "yesterday")
LARK = 'start: item ("," item){0,4}\nitem: "(" item? ")" | WORD\nWORD: /[a-c]{1,3}/'
GBNF = 'root ::= "x" root | "y"'


def json_of(schema: dict) -> StructuredOutputs:
    return StructuredOutputs(json=schema, disable_any_whitespace=True)


FORMS = [
    *map(json_of, SCHEMAS),
    *(StructuredOutputs(regex=pattern) for pattern in PATTERNS),
    StructuredOutputs(choice=CHOICES),
    StructuredOutputs(grammar=LARK),
    StructuredOutputs(grammar=GBNF),
]


def holds(asked: StructuredOutputs, text: str) -> bool:
    """Whether a text has its form, as someone else judges."""
    match asked.form:
        case "json":
            jsonschema.validate(json.loads(text), asked.json)
            return True
        case "regex":
            return re.fullmatch(asked.regex, text) is not None
        case "choice":
            return text in asked.choice
    return re.fullmatch(r"x*y|[a-c(),]*", text) is not None and text.count("(") == text.count(")")


def mixed(first: int = 0) -> list[Add]:
    """Requests of all forms between plain ones, with prompts that share a beginning."""
    adds = []
    for i, form in enumerate(FORMS):
        adds.append(add(first + 2 * i, form, [*PROMPT * 3, 80 + i], max_tokens=120))
        adds.append(add(first + 2 * i + 1, None, [*PROMPT * 3, 90 + i], temperature=0.9, max_tokens=30, top_p=0.9))
    return adds


@pytest.fixture(scope="module")
def alone(facts, tokenizer) -> list[list[int]]:
    """Each request of `mixed` by itself."""
    one = Forms(facts, tokenizer, {"async_scheduling": False, "enable_prefix_caching": False})
    tokens = [one.run([each])[0] for each in mixed()]
    one.close()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"async_scheduling": False, "max_num_batched_tokens": 7},
        {"num_blocks": 101, "max_num_batched_tokens": 16},
        {"num_blocks": 101, "enable_prefix_caching": False},
    ],
    ids=["batched", "chunked", "preempted", "preempted_uncached"],
)
def test_every_form_in_any_company(start: Start, alone: list[list[int]], changes: dict[str, object]) -> None:
    """Forms hold, and neither the requests with one nor the plain ones beside them get other tokens for it."""
    runner = start(**changes)
    tokens = runner.run(mixed())
    assert tokens == alone
    for form, ids in zip(FORMS, tokens[::2], strict=True):
        assert ids[-1] == END, runner.text(ids)
        assert holds(form, runner.text(ids)), (form, runner.text(ids))
    stats = runner.engine.stats()
    assert (stats.preemptions > 0) == ("num_blocks" in changes)
    assert (stats.prefix_hits > 0) == changes.get("enable_prefix_caching", True)


@pytest.mark.slow
def test_it_goes_on_elsewhere_where_it_was(start: Start, alone: list[list[int]]) -> None:
    cut = [
        msgspec.structs.replace(one, output_token_ids=ids[: len(ids) // 2])
        for one, ids in zip(mixed(), alone, strict=True)
    ]
    assert start().run(cut) == [ids[len(ids) // 2 :] for ids in alone]


def test_tokens_are_the_same_where_masks_come_first(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = [add(i, form, temperature=0.0, max_tokens=40) for i, form in enumerate(FORMS)]
    runner = start()
    filled: list[int] = []
    fill = RowGrammar.fill
    monkeypatch.setattr(RowGrammar, "fill", lambda *args: (filled.append(1), fill(*args))[1])
    tokens, others = runner.run(greedy), runner.run(mixed())
    filled.clear()
    free = [add(40 + i, StructuredOutputs(regex=r"(.|\n)*"), temperature=2.0 * i, max_tokens=40) for i in range(2)]
    texts = runner.run(free)
    assert len(filled) < sum(map(len, texts)) * 0.8, "what is allowed needs no mask"
    monkeypatch.setattr(Sampler, "_may_wait", lambda *args: False)
    monkeypatch.setattr(Batch, "all_plain", lambda *args: False)
    assert runner.run(greedy) == tokens
    filled.clear()
    assert runner.run(free) == texts
    assert len(filled) >= sum(map(len, texts))
    assert runner.run(mixed()) == others


def test_whether_a_token_may_follow_is_told_as_by_the_mask(vocabulary: Vocabulary) -> None:
    library, draw = Guidance(vocabulary), random.Random(1)
    told = 0
    for form in FORMS:
        matcher = library.compile(form).matcher()
        bits = np.empty(-(-VOCAB // 32), np.int32)
        for _ in range(30):
            matcher.fill(bits)
            allowed = np.unpackbits(bits.view(np.uint8), count=VOCAB, bitorder="little").astype(bool)
            assert [matcher.allows(token) for token in range(1, VOCAB)] == allowed[1:].tolist()
            told += 1
            following = np.flatnonzero(allowed[1:]) + 1
            if not len(following):
                break
            matcher.consume(draw.choice(following.tolist()))
    assert told > 100


def test_any_json_object(start: Start) -> None:
    runner = start()
    adds = [add(i, StructuredOutputs(json_object=True), max_tokens=380) for i in range(12)]
    texts = [runner.text(ids) for ids in runner.run(adds) if ids[-1] == END]
    assert texts, "random objects rarely end by themselves, but some do"
    assert all(isinstance(json.loads(text), dict) for text in texts)


def test_choices_differ_and_repeat(start: Start) -> None:
    runner = start()
    adds = [msgspec.structs.replace(add(i, FORMS[8], seed=3), choice_index=i) for i in range(6)]
    first = runner.run(adds)
    assert len(set(map(tuple, first))) > 3
    assert runner.run(adds) == first
    assert all(holds(FORMS[8], runner.text(ids)) for ids in first)


def test_logprobs_are_the_model_s_own(start: Start) -> None:
    runner = start()
    runner.run([add(0, None, temperature=0.0, max_tokens=1, logprobs=5)])
    free = runner.outputs[0][0].logprobs[0]
    runner.run([add(0, StructuredOutputs(choice=("q",)), temperature=0.0, logprobs=5)])
    held = runner.outputs[0][0].logprobs[0]
    assert held.top_ids == free.top_ids
    assert held.top_logprobs == free.top_logprobs
    assert held.token_id != free.token_id
    assert held.rank > 1


def test_forced_calls(start: Start) -> None:
    runner = start()
    for parallel in (False, True):
        form = forced_calls(TOOLS, "required", parallel).form
        for ids in runner.run([add(i, form, max_tokens=390) for i in range(6)]):
            if ids[-1] == END:
                calls = json.loads(runner.text(ids))
                assert parallel or len(calls) == 1
                assert {call["name"] for call in calls} <= {"draw", "now"}
                for call in calls:
                    jsonschema.validate(call["parameters"], POINT if call["name"] == "draw" else {"maxProperties": 0})
    (ids,) = runner.run([add(0, forced_calls(TOOLS, NAMED, True).form)])
    jsonschema.validate(json.loads(runner.text(ids)), POINT)


def test_min_tokens_stop_tokens_and_the_end(start: Start, tokenizer) -> None:
    runner = start()
    star = StructuredOutputs(regex="(ab)*c?")
    assert all(len(ids) >= 9 for ids in runner.run([add(i, star, min_tokens=9) for i in range(5)]))
    # The grammar has more to say than min_tokens: once it has ended, nothing but the end follows.
    (ids,) = runner.run([add(0, StructuredOutputs(choice=("b",)), min_tokens=5)])
    assert ids == [*tokenizer.encode("b", False), *[END] * 4]
    (ids,) = runner.run([add(0, StructuredOutputs(choice=("b",)), ignore_eos=True, max_tokens=4)])
    assert ids == [*tokenizer.encode("b", False), *[END] * 3]
    (stop,) = tokenizer.encode("!", False)
    ends = {ids[-1] for ids in runner.run([add(i, star, stop_token_ids=(stop,)) for i in range(20)])}
    assert ends == {END, stop}
    (a,) = tokenizer.encode("a", False)
    (ids,) = runner.run([add(1, StructuredOutputs(regex="[bc]{4}a[bc]{4}"), stop_token_ids=(a,))])
    assert ids[-1] == a


def test_everything_is_free_before_the_end_of_the_reasoning(start: Start, tokenizer) -> None:
    mark = tuple(tokenizer.encode("!", False))
    asked = StructuredOutputs(choice=("yes", "no"), after_ids=(tuple(tokenizer.encode("?!", False)), mark))
    runner = start()
    adds = [add(i, asked, logit_bias={mark[0]: 4.0, END: -100.0}) for i in range(6)]
    for text in map(runner.text, runner.run(adds)):
        free, _, answer = text.partition("!")
        assert free not in ("yes", "no")
        assert answer in ("yes", "no")


@pytest.mark.parametrize("begin", ["!", "yesterday!", "no!", "?!"])
def test_answers_keep_to_their_form_unless_they_begin_as_reasoning(start: Start, tokenizer, begin: str) -> None:
    runner = start()
    ids, mark = tuple(tokenizer.encode(begin, False)), tuple(tokenizer.encode(">", False))
    asked = StructuredOutputs(choice=("yes", "no"), begin_ids=(ids,), after_ids=(mark,))
    plain = [add(i, asked, logit_bias={mark[0]: 4.0, END: 9.0}) for i in range(6)]
    likely = {END: 9.0, **dict.fromkeys(ids, 20.0), mark[0]: 25.0}
    thoughtful = [add(i, asked, logit_bias=likely) for i in range(6, 12)]
    for text in map(runner.text, runner.run([*plain, *thoughtful])):
        if text.startswith(begin):
            text = text.partition(">")[2]
        assert text in ("yes", "no")
    shown = [runner.text(out) for out in runner.run([add(20, asked, output=[*ids], logit_bias={mark[0]: 25.0})])]
    assert shown[0].partition(">")[2] in ("yes", "no")


def test_what_contradicts_the_form_ends_the_request_alone(start: Start, tokenizer) -> None:
    runner = start()
    adds = [
        add(0, StructuredOutputs(choice=("abc",)), allowed_token_ids=tuple(tokenizer.encode("xyz", False))),
        add(1, StructuredOutputs(choice=("abc",)), output=tokenizer.encode("nothing", False)),
        add(2, StructuredOutputs(choice=("abc",)), logit_bias={5: 1.0}),
    ]
    for one in adds:
        runner.engine.add(0, one)
    with runner._changed:
        done = lambda: all(i in runner.outputs and runner.outputs[i][-1].finish_reason for i in range(3))  # noqa: E731
        assert runner._changed.wait_for(done, timeout=30)
    reasons = [runner.outputs[i][-1].finish_reason for i in range(3)]
    assert reasons == ["error", "error", "stop"]
    assert "forbid every token" in runner.outputs[0][-1].error
    assert "form" in runner.outputs[1][-1].error
