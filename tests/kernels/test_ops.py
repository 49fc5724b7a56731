"""Every version of every operation against the formula of its contract, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rayllm_kernels import Ops, cpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 64), (70, 1003), (3, 2, 33), (2, 5, 80)], ids=str)
def test_rms_norm(ops: Ops, dtype: torch.dtype, plus_one: bool, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.25).sqrt() * (weight.double() + plus_one)
    check(ops.rms_norm(x, weight, 0.25, plus_one), expected, dtype)


@dtypes
def test_add_rms_norm(ops: Ops, dtype: torch.dtype) -> None:
    x, residual = random(4, 30, dtype=dtype), random(4, 30, dtype=dtype, seed=1)
    weight = random(30, dtype=dtype, seed=2)
    total = residual + x
    normed, stream = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(stream, total)
    check(normed, ops.rms_norm(total, weight, 1e-5).double(), dtype)


@dtypes
@pytest.mark.parametrize("rotated", [2, 8, 12])
def test_rotary(ops: Ops, dtype: torch.dtype, rotated: int) -> None:
    """As the product of complex numbers: entry i real, entry i + R / 2 imaginary."""
    q, k = random(5, 3, 12, dtype=dtype), random(5, 1, 12, dtype=dtype, seed=1)
    angles = random(5, rotated // 2, seed=2) * 10
    half = rotated // 2
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128).unsqueeze(1)
    outputs = ops.rotary(q.clone(), k.clone(), torch.cat((angles.cos(), angles.sin()), dim=-1))
    for x, output in zip((q, k), outputs, strict=True):
        wide = x.double()
        turned = torch.complex(wide[..., :half], wide[..., half:rotated]) * turn
        check(output, torch.cat((turned.real, turned.imag, wide[..., rotated:]), dim=-1), dtype)


@dtypes
def test_gated_activations(ops: Ops, dtype: torch.dtype) -> None:
    x = random(3, 26, dtype=dtype) * 3
    gate, up = x.double().chunk(2, dim=-1)
    check(ops.silu_and_mul(x), gate / (1 + (-gate).exp()) * up, dtype)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    check(ops.gelu_tanh_and_mul(x), 0.5 * gate * (1 + inner.tanh()) * up, dtype)


@dtypes
@pytest.mark.parametrize("rows", [1, 2, 3, 17])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(ops: Ops, dtype: torch.dtype, rows: int, bias: bool) -> None:
    x, weight = random(rows, 24, dtype=dtype), random(11, 24, dtype=dtype, seed=1) / 5
    offset = random(11, dtype=dtype, seed=2) if bias else None
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    check(ops.linear(x, weight, offset), expected, dtype)


@dtypes
@pytest.mark.parametrize("rows", [2, 3])
def test_widened_linear(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine selects; weights in several chunks, the last one smaller."""
    monkeypatch.setattr(cpu, "_CHUNK_VALUES", 100)
    x, weight, offset = random(rows, 24, dtype=dtype), random(11, 24, dtype=dtype, seed=1), random(11, dtype=dtype)
    check(cpu.linear(x, weight, offset), functional.linear(x.double(), weight.double(), offset.double()), dtype)


def test_embedding(ops: Ops) -> None:
    table = random(9, 4)
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([8, 0, 3, 3], dtype=dtype)
        assert torch.equal(ops.embedding(ids, table), table[[8, 0, 3, 3]])
