"""The sampler, row by row, on small vocabularies."""

import math

import msgspec
import numpy as np
import pytest
import torch

from rayllm.messages.sampling import SamplingParams, Thinking
from rayllm.messages.worker import StartRow, StepPlan
from rayllm.worker.batch import Batch
from rayllm.worker.noise import noise_keys, stream_key
from rayllm.worker.sampler import Sampled, Sampler
from rayllm.worker.thinking import ThinkingLimit
from rayllm_kernels.native.library import Machine, library
from rayllm_kernels.sampling import REFERENCE, SamplingOps

VOCAB = 64


@pytest.fixture(params=["reference", "native"])
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    if request.param == "reference":
        return REFERENCE
    if library() is None:
        pytest.skip("no C++ compiler here")
    return Machine(2).sampling()


def state(prompt: list[int], output: list[int] | None = None, *, choice: int = 0, **sampling: object) -> StartRow:
    """A request that stands before its next token. Token 0 ends it."""
    params = SamplingParams(**({"seed": 7, "temperature": 1.0} | sampling))
    return StartRow(0, [*prompt, *(output or [])], len(prompt), 0, [], params, choice)


def greedy(prompt: list[int], output: list[int] | None = None, **sampling: object) -> StartRow:
    return state(prompt, output, temperature=0.0, **sampling)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def batch_of(rows: list[StartRow]) -> Batch:
    longest = max(len(row.token_ids) for row in rows) + 8
    batch = Batch(rows=len(rows), max_tokens=longest, block_size=16, vocab_size=VOCAB, end_tokens=(0,))
    starts = [
        StartRow(i, row.token_ids, row.prompt_length, 0, [], row.sampling, row.choice_index)
        for i, row in enumerate(rows)
    ]
    batch.apply(StepPlan(0, starts, [], [], []))
    return batch


def sample(logits_RV: torch.Tensor, rows: list[StartRow], ops: SamplingOps, processors: object = None) -> Sampled:
    ask = batch_of(rows).sample_ask(np.arange(len(rows)))
    return Sampler(processors or {}, ops).sample(logits_RV.clone(), ask)


def one(logits_V: torch.Tensor, row: StartRow, ops: SamplingOps = REFERENCE) -> int:
    return sample(logits_V[None], [row], ops).token_ids[0]


def many(logits_V: torch.Tensor, positions: range, ops: SamplingOps, **sampling: object) -> list[int]:
    """What a row would draw at each of the positions."""
    return sample(logits_V.expand(len(positions), -1), [state([1] * i, **sampling) for i in positions], ops).token_ids


KINDS: list[dict[str, object]] = [
    {}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3, "logprobs": 2}, {"min_p": 0.1, "logprobs": 0},
    {"repetition_penalty": 1.4, "logprobs": 2}, {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.2},
    {"logit_bias": {3: 2.0, 9: -1.0}}, {"bad_words_ids": ((5,), (3, 6)), "logprobs": -1},
    {"allowed_token_ids": (3, 9, 40), "logprobs": 1}, {"min_tokens": 4}, {"temperature": 0.0, "logprobs": 3},
]  # fmt: skip


def test_a_row_gets_the_same_alone_and_in_a_batch(ops: SamplingOps) -> None:
    rows = [state([1, 2, i], [3] * (i % 4), seed=i, **KINDS[i % len(KINDS)]) for i in range(48)]
    logits_RV = torch.stack([logits(i) for i in range(48)])
    whole = sample(logits_RV, rows, ops)
    for i, row in enumerate(rows):
        alone = sample(logits_RV[i : i + 1], [row], ops)
        assert alone.token_ids == whole.token_ids[i : i + 1]
        assert alone.logprobs.get(0) == whole.logprobs.get(i)
        assert (i in whole.logprobs) == (row.sampling.logprobs is not None)


def test_tokens_are_those_of_the_reference(ops: SamplingOps) -> None:
    rows = [state([1, 2, i % VOCAB], [3] * (i % 4), seed=i, **KINDS[i % len(KINDS)]) for i in range(96)]
    logits_RV = torch.stack([logits(i) for i in range(96)])
    assert sample(logits_RV, rows, ops).token_ids == sample(logits_RV, rows, REFERENCE).token_ids


def test_sampling_goes_on_where_a_moved_row_left_off(ops: SamplingOps) -> None:
    """Appending a sampled token leaves a row as it would start with that token."""
    for kind in KINDS:
        batch = batch_of([state([1, 2], **kind)])
        output: list[int] = []
        for step in range(6):
            token = Sampler({}, ops).sample(logits(step)[None].clone(), batch.sample_ask(np.array([0]))).token_ids[0]
            assert token == one(logits(step), state([1, 2], output, **kind), ops)
            batch.append(np.array([0]), [token])
            output.append(token)


def test_a_row_is_plain_when_nothing_changes_or_reports_its_logits() -> None:
    rows = [greedy([1]), greedy([1], min_tokens=1), state([1]), greedy([1], logprobs=0), greedy([1], logit_bias={1: 1})]
    batch = batch_of(rows)
    assert [batch.all_plain(np.array([i])) for i in range(len(rows))] == [True, False, False, False, False]
    assert not batch.all_plain(np.array([0, 2]))
    batch.append(np.array([0, 1]), [5, 5])
    assert batch.all_plain(np.array([0, 1])), "the least number of tokens is there"


def test_noise_differs_by_seed_choice_and_position() -> None:
    streams = np.array([stream_key(s, c) for s in (0, 1, -5, 2**63) for c in range(3)], np.uint64)
    keys = np.concatenate([noise_keys(streams, np.full(12, p, np.int32)) for p in range(50)])
    assert len(set(keys.tolist())) == 600


def test_samples_follow_the_distribution(ops: SamplingOps) -> None:
    """4,000 draws of 8 tokens: a fair sampler strays this far (chi-square above 29.9) once in 10,000 runs."""
    logits_V = torch.tensor([0.0, 0.5, 1.0, -1.0, 2.0, 0.3, -0.4, 1.5])
    wanted = torch.softmax(logits_V / 0.8, 0).numpy() * 4000
    rows = [state([1], temperature=0.8, seed=i) for i in range(4000)]
    counts = np.bincount(sample(logits_V.expand(4000, -1), rows, ops).token_ids, minlength=8)
    assert ((counts - wanted) ** 2 / wanted).sum() < 29.9


def test_filters_leave_what_they_say(ops: SamplingOps) -> None:
    logits_V = logits(3)
    probs = torch.softmax(logits_V, 0)
    order = torch.argsort(-probs).tolist()
    assert set(many(logits_V, range(1, 300), ops, top_k=3)) == set(order[:3])
    nucleus = order[: int((torch.cumsum(probs[order], 0) < 0.7).sum()) + 1]
    assert set(many(logits_V, range(1, 600), ops, top_p=0.7)) == set(nucleus)
    enough = {i for i in range(VOCAB) if probs[i] >= 0.05 * probs.max()}
    assert set(many(logits_V, range(1, 600), ops, min_p=0.05)) <= enough
    assert one(logits_V, state([1], top_p=1e-9), ops) == order[0]
    assert one(torch.zeros(VOCAB), state([1], top_k=VOCAB + 5), ops) in range(VOCAB)


def test_penalties_count_as_documented() -> None:
    flat = torch.zeros(VOCAB)
    flat[5], flat[6] = 1.0, 0.9
    assert one(flat, greedy([5])) == 5
    assert one(flat, greedy([5], presence_penalty=2.0, frequency_penalty=2.0)) == 5, "the prompt does not count"
    assert one(flat, greedy([1], [5], presence_penalty=0.2)) == 6
    assert one(flat, greedy([1], [5], frequency_penalty=0.06)) == 5
    assert one(flat, greedy([1], [5, 5], frequency_penalty=0.06)) == 6
    assert one(flat, greedy([5], repetition_penalty=1.2)) == 6, "the prompt counts"
    assert one(flat, greedy([1], [5], repetition_penalty=1.2)) == 6
    assert one(-flat - 1, greedy(list(range(5)) + list(range(7, VOCAB)), [5], repetition_penalty=3.0)) == 6


def test_bans_and_biases() -> None:
    logits_V = logits(1)
    best = int(logits_V.argmax())
    assert one(logits_V, greedy([1], logit_bias={9: 100.0})) == 9
    assert one(logits_V, greedy([1], logit_bias={best: -100.0})) != best
    assert one(logits_V, greedy([1], allowed_token_ids=(3, 4))) in (3, 4)
    assert one(logits_V, greedy([1], bad_words_ids=((best,),))) != best
    assert one(logits_V, greedy([1], [2], bad_words_ids=((2, best),))) != best
    assert one(logits_V, greedy([1], [3], bad_words_ids=((2, best),))) == best
    assert one(logits_V, greedy([2], bad_words_ids=((2, best),))) == best, "a word does not begin in the prompt"


def test_min_tokens_bars_end_tokens() -> None:
    logits_V = torch.zeros(VOCAB)
    logits_V[0] = 10
    assert one(logits_V, greedy([1], [2], min_tokens=1)) == 0
    assert one(logits_V, greedy([1], [2], min_tokens=2)) != 0


def test_logprobs_are_those_of_the_model(ops: SamplingOps) -> None:
    logits_V = logits(2)
    wanted = torch.log_softmax(logits_V, 0)
    entry = sample(logits_V[None], [greedy([1], logit_bias={9: 100.0}, logprobs=3)], ops).logprobs[0]
    assert entry.token_id == 9
    assert math.isclose(entry.logprob, wanted[9], rel_tol=1e-5)
    assert entry.rank == int((wanted > wanted[9]).sum()) + 1
    assert entry.top_ids == torch.topk(wanted, 3).indices.tolist()
    whole = Sampler({}, ops).read(logits_V[None], np.array([4], np.int32), -1)[0]
    assert len(whole.top_ids) == VOCAB


def test_logprobs_of_tokens_that_are_asked_for(ops: SamplingOps) -> None:
    logits_RV = torch.stack([logits(2), logits(3), logits(4)])
    asked = greedy([1], logit_bias={9: 100.0}, logprobs=0, logprob_token_ids=(3, 9, 7))
    rows = [greedy([1], logprobs=2), asked, greedy([1], logprob_token_ids=(4,), logprobs=0)]
    plain, entry, last = (sample(logits_RV, rows, ops).logprobs[i] for i in range(3))
    wanted = torch.log_softmax(logits_RV, 1)
    assert entry.token_id == 9
    assert entry.top_ids == sorted((3, 9, 7), key=lambda id_: -wanted[1, id_])
    assert entry.top_logprobs == pytest.approx([float(wanted[1, id_]) for id_ in entry.top_ids], rel=1e-5)
    assert entry.top_ranks == [int((wanted[1] > wanted[1, id_]).sum()) + 1 for id_ in entry.top_ids]
    assert (len(plain.top_ids), plain.top_ranks, last.top_ids) == (2, [], [4])
    processed = Sampler({}, ops, "processed_logprobs").sample(
        logits_RV.clone(), batch_of(rows).sample_ask(np.arange(3))
    )
    assert processed.logprobs[1].top_ids[0] == 9
    assert processed.logprobs[1].top_logprobs[0] == pytest.approx(0.0)


@pytest.mark.option("logprobs-mode")
def test_the_four_modes_report_four_values(ops: SamplingOps) -> None:
    """Temperature one half, a bias, a penalty and two filters; each value against a plain computation."""
    logits_V = logits(5)
    best, second = torch.topk(logits_V, 2).indices.tolist()
    row = state([1], [best], temperature=0.5, logit_bias={second: 1.0}, presence_penalty=0.25, top_k=5, logprobs=8)
    shown_V = logits_V.clone()
    shown_V[second] += 1.0
    shown_V[best] -= 0.25
    shown_V /= 0.5
    shown_V[shown_V < torch.topk(shown_V, 5).values[-1]] = -math.inf
    wanted = {
        "raw_logits": logits_V,
        "raw_logprobs": torch.log_softmax(logits_V, 0),
        "processed_logits": shown_V,
        "processed_logprobs": torch.log_softmax(shown_V, 0),
    }
    tokens, values = set(), set()
    for mode, wanted_V in wanted.items():
        ask = batch_of([row]).sample_ask(np.array([0]))
        entry = Sampler({}, ops, mode).sample(logits_V[None].clone(), ask).logprobs[0]
        assert math.isclose(entry.logprob, wanted_V[entry.token_id], rel_tol=1e-5)
        assert entry.top_logprobs == pytest.approx(wanted_V[entry.top_ids].tolist(), rel=1e-5)
        assert entry.top_ids[:5] == torch.topk(wanted_V, 5).indices.tolist()
        assert entry.rank == int((wanted_V > wanted_V[entry.token_id]).sum()) + 1
        tokens.add(entry.token_id)
        values.add(entry.logprob)
    assert len(tokens) == 1
    assert len(values) == 4


@pytest.mark.option("logprobs-mode")
def test_greedy_rows_report_what_the_likeliest_was_taken_of(ops: SamplingOps) -> None:
    logits_V = logits(5)
    ask = batch_of([greedy([1], logit_bias={9: 100.0}, top_k=1, logprobs=1)]).sample_ask(np.array([0]))
    entry = Sampler({}, ops, "processed_logits").sample(logits_V[None].clone(), ask).logprobs[0]
    assert entry.token_id == 9
    assert entry.logprob == pytest.approx(float(logits_V[9]) + 100)


@pytest.mark.option("logprobs-mode")
def test_prompt_tokens_are_read_as_if_they_had_been_sampled(ops: SamplingOps) -> None:
    sampling = {"temperature": 0.5, "repetition_penalty": 1.3, "bad_words_ids": ((7,),), "min_tokens": 1, "top_p": 0.9}
    row = state([3, 7, 5, 6, 8], **sampling)
    logits_RV = torch.stack([logits(i) for i in range(4)])
    ask = batch_of([row]).prompt_ask(0, 1, 4)
    read = Sampler({}, ops, "processed_logprobs").read(logits_RV.clone(), np.array([7, 5, 6, 8], np.int32), 3, ask)
    for i, entry in enumerate(read):
        one_row = state([3, 7, 5, 6, 8][: i + 1], **sampling, logprobs=3)
        ask = batch_of([one_row]).sample_ask(np.array([0]))
        sampled = Sampler({}, ops, "processed_logprobs").sample(logits_RV[i : i + 1].clone(), ask).logprobs[0]
        assert (entry.top_ids, entry.top_logprobs) == (sampled.top_ids, sampled.top_logprobs)
    assert [entry.token_id for entry in read] == [7, 5, 6, 8]
    assert read[0].logprob == -math.inf, "a bad word"


class Pick:
    name = "pick"

    def __init__(self, model: object) -> None:
        pass

    def __call__(self, logits_V: torch.Tensor, prompt: list[int], output: list[int], argument: object) -> torch.Tensor:
        logits_V[:] = float("-inf")
        logits_V[argument] = 0.0
        return logits_V


def test_processors_and_their_faults_stay_with_their_row(ops: SamplingOps) -> None:
    rows = [greedy([1]), state([1], extra_args={"pick": 7}), state([1], extra_args={"pick": 1000})]
    sampled = sample(torch.stack([logits(i) for i in range(3)]), rows, ops, {"pick": Pick(None)})
    assert sampled.token_ids[0] == int(logits(0).argmax())
    assert sampled.token_ids[1] == 7
    assert list(sampled.failed) == [2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_that_leave_nothing_fail_the_row_alone(temperature: float, ops: SamplingOps) -> None:
    row = state([1], temperature=temperature, allowed_token_ids=(0,), min_tokens=3)
    sampled = sample(torch.stack([logits(0), logits(1)]), [row, greedy([1])], ops)
    assert list(sampled.failed) == [0]
    assert sampled.token_ids[1] == int(logits(1).argmax())


def thought(prompt: list[int], limit: Thinking, total: int, ops: SamplingOps, **more: object) -> list[int]:
    """The output of a row whose likeliest token is always 7, begun anew for each token, as after a preemption."""
    output: list[int] = []
    likes_7 = torch.zeros(1, VOCAB)
    likes_7[0, 7] = 5.0
    for _ in range(total):
        output += sample(likes_7, [greedy(prompt, output, thinking=limit, **more)], ops).token_ids
    return output


@pytest.mark.parametrize(
    ("limit", "output"),
    [
        (Thinking(budget=3, inside=True, begin_ids=((1,),), mark_ids=((2,),), end_ids=(2,)), [7, 7, 7, 2, 7, 7, 7]),
        (Thinking(budget=0, inside=True, begin_ids=(), mark_ids=((2,),), end_ids=(5, 6, 2)), [5, 6, 2, 7, 7, 7, 7]),
        (Thinking(budget=1, begin_ids=((1,),), mark_ids=((2,),), end_ids=(2,)), [7] * 7),
        (Thinking(budget=2, begin_ids=((7, 7),), mark_ids=((2, 3),), end_ids=(2, 3)), [7, 7, 7, 7, 2, 3, 7]),
    ],
)
def test_reasoning_ends_with_its_budget(limit: Thinking, output: list[int], ops: SamplingOps) -> None:
    assert thought([9], limit, 7, ops) == output
    constrained = {"bad_words_ids": ((2,), (6,)), "allowed_token_ids": (7,), "logit_bias": {2: -100.0}}
    assert thought([9], limit, 7, ops, **constrained) == output, "the end of reasoning comes whatever else is asked for"


def test_a_form_that_holds_already_is_kept(ops: SamplingOps) -> None:
    class Only7:
        must_end = tells = False

        def fill(self, output: object, bits: np.ndarray) -> None:
            bits.fill(0)
            bits[0] = 1 << 7

    limit = Thinking(budget=0, inside=True, begin_ids=(), mark_ids=((2,),), end_ids=(2,))
    batch = batch_of([greedy([9], thinking=limit)])
    batch.state(0).grammar = Only7()  # type: ignore[assignment]
    sampled = Sampler({}, ops).sample(torch.zeros(1, VOCAB), batch.sample_ask(np.arange(1)))
    assert (sampled.token_ids, sampled.failed) == ([7], {})


def test_reasoning_may_end_by_itself_and_begin_again(ops: SamplingOps) -> None:
    limit = Thinking(budget=3, inside=True, begin_ids=((1,),), mark_ids=((2,),), end_ids=(2,))
    follow = ThinkingLimit(limit)
    output = np.array([7, 7, 2, 8, 8, 1, 7], np.int32)
    assert [follow.forced(output[:n]) for n in range(8)] == [None] * 7 + [2], "all reasoning counts together"
    assert ThinkingLimit(limit).forced(output) == 2
    several = msgspec.structs.replace(limit, mark_ids=((2,), (3, 4)))
    for ids, forced in (([7, 3, 4, 7, 7, 7], None), ([7, 2, 7, 7, 7], None), ([7, 4, 3], 2)):
        assert ThinkingLimit(several).forced(np.array(ids, np.int32)) == forced
