"""The reference of sampling: what its contract says, by the plainest means."""

import numpy as np
import torch

from rayllm_kernels.sampling import Draws, choose, gumbel, log_probabilities

KEYS = np.arange(400, dtype=np.uint64) * np.uint64(77)


def seen(
    logits: list[float], *, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> set[int]:
    """The tokens that 400 draws come upon."""
    n = len(KEYS)
    draws = Draws(np.full(n, temperature, np.float32), np.full(n, min_p), np.full(n, top_k), np.full(n, top_p), KEYS)
    return set(choose(torch.tensor(logits).expand(n, -1), draws).tolist())


def test_noise_belongs_to_its_key_and_token() -> None:
    assert not np.array_equal(gumbel(1, np.arange(9)), gumbel(2, np.arange(9)))
    assert np.array_equal(gumbel(1, np.arange(9))[3:5], gumbel(1, np.array([3, 4])))
    noise = gumbel(3, np.arange(100_000))
    assert abs(noise.mean() - np.euler_gamma) < 0.02, "Gumbel's mean; the standard error is 0.004"
    assert abs(noise.var() - np.pi**2 / 6) < 0.1


def test_equals_at_an_edge_all_stay() -> None:
    assert seen([2.0, 1.0, 1.0, 0.0, 1.0], top_k=2) == {0, 1, 2, 4}
    assert seen([0.0] * 6, top_p=0.1) == set(range(6))
    assert seen([0.0, 0.0, -3.0], min_p=1.0) == {0, 1}


def test_filters_follow_each_other() -> None:
    halves = [float(np.log(p)) for p in (0.4, 0.3, 0.2, 0.1)]
    assert seen(halves, top_p=0.65) == {0, 1}
    assert seen(halves, top_k=3, top_p=0.65) == {0, 1}, "0.4 of 0.9 is too little"
    assert seen(halves, top_k=2, top_p=0.55) == {0}, "0.4 of 0.7 is enough"
    assert seen(halves, temperature=0.01) == {0}
    assert seen(halves, min_p=0.6) == {0, 1}


def test_what_is_barred_is_never_chosen() -> None:
    never = float("-inf")
    assert seen([never, 1.0, never, float("nan")], temperature=100.0) == {1}
    assert seen([never, never]) == {-1}
    assert seen([never, never], temperature=0.0) == {-1}


def test_ranks_and_alternatives_of_equals() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 1.0, 3.0]])
    found = log_probabilities(logits_RV, np.array([0, 0]), np.array([0, 3]), 3)
    assert found.ranks.tolist() == [3, 1]
    assert found.top_ids.tolist() == [[1, 3, 0]] * 2
    assert np.allclose(found.logprobs, torch.log_softmax(logits_RV, 1)[0, [0, 3]].numpy())
