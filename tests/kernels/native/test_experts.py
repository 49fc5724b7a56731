"""The compiled experts: the same bits in any company, and the router by its definition."""

from typing import Any

import pytest
import torch

from rayllm.model.moe import route
from rayllm.model.spec import MoeSpec
from rayllm_kernels.native.library import Machine, Router
from tests.kernels.conftest import library_of
from tests.kernels.native.test_program import ROWS, Bench
from tests.kernels.test_experts import choices, some_experts


@pytest.fixture(scope="module")
def machine(variant: str) -> Machine:
    return Machine(2, library_of(variant))


@pytest.mark.parametrize(("dtype", "integer"), [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)])
def test_a_row_is_the_same_in_any_company(machine: Machine, variant: str, dtype: torch.dtype, integer: bool) -> None:
    packed = machine.pack_experts(some_experts(7, 90, 70, dtype, "silu", bias=False), integer=integer)
    x, (ids, weights) = torch.randn(300, 90), choices(300, 3, 7)
    together = machine.experts(x, ids, weights, packed)
    assert torch.equal(Machine(1, library_of(variant)).experts(x, ids, weights, packed), together)
    for begin, end in ((0, 1), (1, 3), (3, 8), (8, 40), (40, 300)):
        apart = machine.experts(x[begin:end], ids[begin:end], weights[begin:end], packed)
        assert torch.equal(apart, together[begin:end]), (begin, end)


ROUTERS: list[dict[str, Any]] = [
    {},
    {"normalised": True, "scale": 2.5},
    {"scores": "sigmoid", "correction": True, "normalised": True},
    {"scores": "sigmoid", "correction": True, "groups": 4, "groups_per_token": 2, "group_score": "two_best"},
    {"groups": 3, "groups_per_token": 1},
]


@pytest.mark.parametrize("more", ROUTERS, ids=str)
def test_router(machine: Machine, more: dict[str, Any]) -> None:
    """As the torch one has it, of equal scores too."""
    bench, chosen = Bench(machine), 3
    spec = MoeSpec(num_experts=24, experts_per_token=chosen, intermediate_size=1, layers=(True,), **more)
    correction = torch.randn(24) if spec.correction else None
    logits = bench.program.buffer(0)
    logits[1, :24] = 0.5
    logits[2, 4:9] = logits[2, :24].max()
    ids, weights = torch.full((ROWS, chosen), -9), torch.full((ROWS, chosen), float("nan"))
    router = Router(
        24, chosen, spec.groups, spec.groups_per_token, spec.scores == "sigmoid", spec.group_score == "two_best",
        spec.normalised, 0, None if correction is None else correction.data_ptr(), spec.scale,
    )  # fmt: skip
    bench.program.route(0, router, ids, weights)
    wanted_ids, wanted = route(logits[:, :24].clone(), spec, correction)
    bench.run(0)
    assert ids.tolist() == wanted_ids.tolist()
    torch.testing.assert_close(weights, wanted)


def test_experts_add_to_what_is_there(machine: Machine) -> None:
    bench = Bench(machine)
    packed = machine.pack_experts(some_experts(4, 40, 9, torch.float32, "gelu_tanh", bias=True), input_scaled=True)
    ids, weights = choices(ROWS, 2, 4)
    bench.program.buffer(1).fill_(2.0)
    bench.program.experts(0, 1, packed, ids, weights, add=True)
    torch.testing.assert_close(bench.run(1), 2.0 + machine.experts(bench.before, ids, weights, packed))
    bench = Bench(machine)
    bench.program.experts(0, 1, packed, ids, weights)
    assert torch.equal(bench.run(1), machine.experts(bench.before, ids, weights, packed))


def test_gate(bench: Bench) -> None:
    bench.program.buffer(1).fill_(2.0)
    bench.program.gate(0, 1)
    torch.testing.assert_close(bench.run(1), 2.0 * bench.before[:, :1].sigmoid().expand(ROWS, 40))


@pytest.fixture
def bench(machine: Machine) -> Bench:
    return Bench(machine)
