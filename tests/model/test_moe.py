"""Routing by its definition, and experts that are held in part."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rayllm.model.layers import Placement
from rayllm.model.moe import Experts, Held, route
from rayllm.model.spec import MoeSpec
from rayllm.parallel.group import SingleGroup
from rayllm.parallel.ranks import Ranks
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
    place = Placement(REFERENCE, torch.float32, torch.device("cpu"))
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


class Counted:
    """A stored tensor that counts the numbers read of it."""

    kind, file = "F32", "model.safetensors"

    def __init__(self, name: str, tensor: Tensor, read: list[int]) -> None:
        self.name, self.shape, self._tensor, self._read = name, tuple(tensor.shape), tensor, read

    def read_stored(self, rows: slice) -> Tensor:
        raise AssertionError

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        part = self._tensor[rows] if columns is None else self._tensor[rows, columns]
        self._read.append(part.numel())
        return part


@pytest.mark.parametrize("stacked", [False, True])
def test_a_rank_reads_only_its_experts(stacked: bool) -> None:
    """From a tensor for each expert, or from one for all; what they hold lies where `experts` expects it."""
    place = Placement(REFERENCE, torch.float32, torch.device("cpu"))
    experts = Experts(place, spec(4, 1), 8, Held([2, 0, 2], Some([2, 0])))
    gate, up, down = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(4, 8, 6)
    read: list[int] = []
    if stacked:
        both = torch.stack((gate, up), dim=2).view(4, 12, 8).mT
        for parts, tensor in ((("gate_up",), both), (("down",), down.mT)):
            assert experts.stored_shape("weight", parts) == tuple(tensor.shape)
            experts.fill("weight", parts, Counted(parts[0], tensor, read))
    else:
        for name, tensors in (("gate", gate), ("up", up), ("down", down)):
            for number, tensor in enumerate(tensors):
                assert experts.expert(number).stored_shape("weight", (name,)) == tuple(tensor.shape)
                experts.expert(number).fill("weight", (name,), Counted(name, tensor, read))
    assert torch.equal(experts.gate_up, torch.cat((gate, up), dim=1)[[2, 0, 2]])
    assert torch.equal(experts.down, down[[2, 0, 2]])
    assert sum(read) == 3 * (6 * 8 * 3)


class Share(SingleGroup):
    """One rank of several, whose sums the test makes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_ranks_divide_the_inner_width_of_each_expert() -> None:
    """And add the biases of what comes out once."""
    described = spec(3, 2, bias=True, activation="clamped")
    stored = {
        ("weight", ("gate", "up")): torch.randn(3, 12, 8), ("bias", ("gate", "up")): torch.randn(3, 12),
        ("weight", ("down",)): torch.randn(3, 8, 6), ("bias", ("down",)): torch.randn(3, 8),
    }  # fmt: skip
    x, ids, weights = torch.randn(7, 8), torch.randint(3, (7, 2)), torch.rand(7, 2)

    def outputs(group: SingleGroup) -> Tensor:
        experts = Experts(Placement(REFERENCE, torch.float32, torch.device("cpu"), Ranks(group)), described, 8)
        for (kind, parts), tensors in stored.items():
            for number, tensor in enumerate(tensors):
                experts.expert(number).fill(kind, parts, Counted(kind, tensor, []))
        return experts(x, ids, weights)

    torch.testing.assert_close(sum(outputs(Share(rank, 3)) for rank in range(3)), outputs(SingleGroup()))
