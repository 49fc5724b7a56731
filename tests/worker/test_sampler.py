"""The sampler, row by row, on small vocabularies."""

import math

import numpy as np
import pytest
import torch

from rayllm.messages.sampling import SamplingParams
from rayllm.worker.batch import RowState
from rayllm.worker.noise import gumbel, noise_key
from rayllm.worker.sampler import Sampler, draw, prompt_logprobs

VOCAB = 64


def state(prompt: list[int], output: list[int] | None = None, *, choice: int = 0, **sampling: object) -> RowState:
    tokens = np.array([*prompt, *(output or []), 0, 0], np.int32)
    params = SamplingParams(**({"seed": 7, "temperature": 1.0} | sampling))
    row = RowState(
        row=0, sampling=params, choice_index=choice, prompt_length=len(prompt), tokens=tokens, end_tokens=(0,),
        length=len(tokens) - 2, distinct=np.unique(np.array(prompt, np.int64)),
    )  # fmt: skip
    for token in output or []:
        row.output_counts[token] = row.output_counts.get(token, 0) + 1
    return row


def greedy(prompt: list[int], output: list[int] | None = None, **sampling: object) -> RowState:
    return state(prompt, output, temperature=0.0, **sampling)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def one(logits_V: torch.Tensor, row: RowState) -> int:
    return Sampler({}).sample(logits_V[None].clone(), [row]).token_ids[0]


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    rows = [state([1, 2, i], temperature=0.5 + i / 10, top_p=0.9, seed=i) for i in range(6)]
    many = torch.stack([logits(i) for i in range(6)])
    assert Sampler({}).sample(many.clone(), rows).token_ids == [one(many[i], rows[i]) for i in range(6)]


def test_noise_differs_by_seed_choice_and_position() -> None:
    keys = {noise_key(s, c, p) for s in (0, 1, -5, 2**63) for c in range(3) for p in range(50)}
    assert len(keys) == 600
    assert not np.array_equal(gumbel(1, np.arange(9)), gumbel(2, np.arange(9)))
    assert np.array_equal(gumbel(1, np.arange(9))[3:5], gumbel(1, np.array([3, 4])))


def test_samples_follow_the_distribution() -> None:
    """4,000 draws of 8 tokens: a fair sampler strays this far (chi-square above 29.9) once in 10,000 runs."""
    logits_V = torch.tensor([0.0, 0.5, 1.0, -1.0, 2.0, 0.3, -0.4, 1.5])
    wanted = torch.softmax(logits_V / 0.8, 0).numpy() * 4000
    counts = np.bincount([draw(logits_V, state([1] * i, temperature=0.8)) for i in range(1, 4001)], minlength=8)
    assert ((counts - wanted) ** 2 / wanted).sum() < 29.9


def test_filters_leave_what_they_say() -> None:
    logits_V = logits(3)
    probs = torch.softmax(logits_V, 0)
    order = torch.argsort(-probs).tolist()
    seen_k = {draw(logits_V, state([1] * i, top_k=3)) for i in range(1, 300)}
    assert seen_k == set(order[:3])
    nucleus = order[: int((torch.cumsum(probs[order], 0) < 0.7).sum()) + 1]
    assert {draw(logits_V, state([1] * i, top_p=0.7)) for i in range(1, 600)} == set(nucleus)
    enough = {i for i in range(VOCAB) if probs[i] >= 0.05 * probs.max()}
    assert {draw(logits_V, state([1] * i, min_p=0.05)) for i in range(1, 3000)} <= enough
    assert draw(logits_V, state([1], top_p=1e-9)) == order[0]
    assert draw(torch.zeros(VOCAB), state([1], top_k=VOCAB + 5)) in range(VOCAB)


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


def test_logprobs_are_those_of_the_model() -> None:
    logits_V = logits(2)
    wanted = torch.log_softmax(logits_V, 0)
    row = greedy([1], logit_bias={9: 100.0}, logprobs=3)
    sampled = Sampler({}).sample(logits_V[None].clone(), [row])
    entry = sampled.logprobs[0]
    assert entry.token_id == 9
    assert math.isclose(entry.logprob, wanted[9], rel_tol=1e-5)
    assert entry.rank == int((wanted > wanted[9]).sum()) + 1
    assert entry.top_ids == torch.topk(wanted, 3).indices.tolist()
    whole = prompt_logprobs(logits_V[None], np.array([4], np.int32), -1)[0]
    assert len(whole.top_ids) == VOCAB


class Pick:
    name = "pick"

    def __init__(self, model: object) -> None:
        pass

    def __call__(self, logits_V: torch.Tensor, prompt: list[int], output: list[int], argument: object) -> torch.Tensor:
        logits_V[:] = float("-inf")
        logits_V[argument] = 0.0
        return logits_V


def test_processors_and_their_faults_stay_with_their_row() -> None:
    sampler = Sampler({"pick": Pick(None)})
    rows = [greedy([1]), state([1], extra_args={"pick": 7}), state([1], extra_args={"pick": 1000})]
    sampled = sampler.sample(torch.stack([logits(i) for i in range(3)]), rows)
    assert sampled.token_ids[0] == int(logits(0).argmax())
    assert sampled.token_ids[1] == 7
    assert list(sampled.failed) == [2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_that_leave_nothing_fail_the_row_alone(temperature: float) -> None:
    row = state([1], temperature=temperature, allowed_token_ids=(0,), min_tokens=3)
    sampled = Sampler({}).sample(torch.stack([logits(0), logits(1)]), [row, greedy([1])])
    assert list(sampled.failed) == [0]
    assert sampled.token_ids[1] == int(logits(1).argmax())
