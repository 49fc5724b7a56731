"""Every version of the products with experts against the formula of its contract, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rayllm_kernels import ExpertWeights, Ops
from tests.kernels.test_ops import check, dtypes, random

ALPHA, LIMIT = 1.3, 0.7


def some_experts(count: int, width: int, inner: int, dtype: torch.dtype, activation: str, bias: bool) -> ExpertWeights:
    return ExpertWeights(
        random(count, 2 * inner, width, dtype=dtype, seed=1) / width**0.5,
        random(count, width, inner, dtype=dtype, seed=2) / inner**0.5,
        random(count, 2 * inner, dtype=dtype, seed=3) if bias else None,
        random(count, width, dtype=dtype, seed=4) if bias else None,
        activation, ALPHA, LIMIT,
    )  # fmt: skip


def choices(rows: int, chosen: int, count: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Different experts for each row, and weights."""
    scores = random(rows, count, seed=seed)
    return scores.argsort(dim=-1)[:, :chosen].contiguous(), random(rows, chosen, seed=seed + 1).sigmoid()


def exact(x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights, input_scaled: bool) -> Tensor:
    """One row and one choice at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
            if expert < 0:
                continue
            given = x[row].double() * (weight if input_scaled else 1.0)
            both = w.gate_up_PFD[expert].double() @ given
            both += 0 if w.gate_up_bias_PF is None else w.gate_up_bias_PF[expert].double()
            gate, up = both.chunk(2)
            if w.activation == "clamped":
                gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
                inner = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
            elif w.activation == "silu":
                inner = functional.silu(gate) * up
            else:
                inner = functional.gelu(gate, approximate="tanh") * up
            y = w.down_PDI[expert].double() @ inner
            y += 0 if w.down_bias_PD is None else w.down_bias_PD[expert].double()
            out[row] += y if input_scaled else y * weight
    return out


@dtypes
@pytest.mark.parametrize(
    ("rows", "chosen", "count", "width", "inner"),
    [(1, 1, 1, 1, 1), (1, 2, 4, 24, 16), (3, 3, 5, 33, 20), (40, 2, 3, 20, 50), (9, 4, 16, 70, 17)],
)
def test_experts(ops: Ops, dtype: torch.dtype, rows: int, chosen: int, count: int, width: int, inner: int) -> None:
    weights = some_experts(count, width, inner, dtype, "silu", bias=False)
    x, (ids, given) = random(rows, width, dtype=dtype), choices(rows, chosen, count)
    check(ops.experts(x, ids, given, weights), exact(x, ids, given, weights, False), dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("input_scaled", [False, True])
def test_kinds_of_experts(ops: Ops, activation: str, bias: bool, input_scaled: bool) -> None:
    weights = some_experts(6, 40, 21, torch.float32, activation, bias)
    x, (ids, given) = random(11, 40) * 3, choices(11, 2, 6)
    check(ops.experts(x, ids, given, weights, input_scaled), exact(x, ids, given, weights, input_scaled), torch.float32)


def test_experts_of_other_ranks_are_left_out(ops: Ops) -> None:
    """A row may have none here, and no row need come at all."""
    weights = some_experts(4, 24, 16, torch.float32, "clamped", bias=True)
    x, (ids, given) = random(5, 24), choices(5, 3, 4)
    ids[0], ids[1, 1], ids[4, 2] = -1, -1, -1
    check(ops.experts(x, ids, given, weights), exact(x, ids, given, weights, False), torch.float32)
    assert not ops.experts(x, torch.full_like(ids, -1), given, weights).any()
    assert ops.experts(x[:0], ids[:0], given[:0], weights).shape == (0, 24)
