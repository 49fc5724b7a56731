"""Routing by its definition, and experts that are held in part."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rayllm.model.layers import Placement
from rayllm.model.moe import Experts, Held, route
from rayllm.model.spec import MoeSpec
from rayllm.parallel.group import SingleGroup
from rayllm_kernels import REFERENCE


def spec(num_experts: int, experts_per_token: int, **more: Any) -> MoeSpec:
    return MoeSpec(
        num_experts=num_experts, experts_per_token=experts_per_token, intermediate_size=6, layers=(True,), **more
    )


def logits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def test_softmax_of_the_best() -> None:
    ids, weights = route(logits([0.0, 3.0, 1.0, 2.0]), spec(4, 2))
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, logits([0.0, 3.0, 1.0, 2.0]).softmax(-1)[:, [1, 3]])
    _, normalised = route(logits([0.0, 3.0, 1.0, 2.0]), spec(4, 2, normalised=True, scale=2.5))
    torch.testing.assert_close(normalised, 2.5 * logits([3.0, 2.0]).softmax(-1))


def test_of_equal_scores_the_lowest_expert() -> None:
    ids, _ = route(torch.zeros(3, 64), spec(64, 5))
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    ids, _ = route(torch.zeros(2, 8), spec(8, 2, groups=4, groups_per_token=2))
    assert ids.tolist() == [[0, 1]] * 2


def test_correction_changes_the_choice_and_no_weight() -> None:
    given = logits([0.0, 1.0, 2.0])
    ids, weights = route(given, spec(3, 1, scores="sigmoid", correction=True), torch.tensor([9.0, 0.0, 0.0]))
    assert ids.tolist() == [[0]]
    torch.testing.assert_close(weights, torch.tensor([[0.5]]))


@pytest.mark.parametrize(("score", "best"), [("max", [4, 5]), ("two_best", [2, 3])])
def test_groups_are_chosen_first(score: str, best: list[int]) -> None:
    """By their best expert, or by their two best."""
    given = logits([0.0, 0.1, 2.0, 1.9, 2.5, -9.0])
    ids, _ = route(given, spec(6, 2, scores="sigmoid", groups=3, groups_per_token=1, group_score=score))
    assert sorted(ids[0].tolist()) == best


class Some:
    """Of the experts of a model those that some rank holds; what others make is added by the test."""

    def __init__(self, logical: list[int]) -> None:
        self.places = {number: place for place, number in enumerate(logical)}

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, ids.clone().apply_(lambda number: self.places.get(number, -1)), weights

    def combine(self, y: Tensor) -> Tensor:
        return y


def test_ranks_with_lists_of_experts_add_up() -> None:
    place = Placement(REFERENCE, torch.float32, torch.device("cpu"), SingleGroup())
    whole = Experts(place, spec(5, 3), 8)
    generator = torch.Generator().manual_seed(0)
    for parameter in whole.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x, given = torch.randn(9, 8, generator=generator), torch.randn(9, 5, generator=generator)
    ids, weights = route(given, whole.spec)
    total = torch.zeros(9, 8)
    for logical in ([3, 0], [4], [1, 2]):
        part = Experts(place, spec(5, 3), 8, Held(logical, Some(logical)))
        part.gate_up.copy_(whole.gate_up[logical])
        part.down.copy_(whole.down[logical])
        total += part(x, ids, weights)
    torch.testing.assert_close(total, whole(x, ids, weights))
