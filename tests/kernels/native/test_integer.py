"""Integer products of quantized weights: a model of the arithmetic, its error, and the same bits everywhere."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from rayllm_kernels.native.library import BLOCK, Epilogue, Kind, Machine, Packed, pair
from tests.kernels.conftest import library_of, runnable_variants
from tests.kernels.native.test_products import random_blocks

DEPTH = 1280
MOST = 32767
"""The largest entry of a rounded row, in two bytes."""


@pytest.fixture(scope="module")
def machine(variant: str) -> Machine:
    return Machine(2, library_of(variant))


def blocks(kind: Kind, columns: int) -> np.ndarray:
    """Random rows with every byte that a file can hold, -128 included, and one column of it alone."""
    rows = random_blocks(kind, columns, DEPTH)
    if kind is Kind.Q8_0:
        rows.reshape(columns, -1, 34)[0, :, 2:] = 0x80
    return rows


def pack(machine: Machine, kind: Kind, rows: np.ndarray) -> Packed:
    return machine.pack(torch.from_numpy(rows), kind, DEPTH, integer=True)


def values(kind: Kind, rows: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind.name]).astype(np.float64)


def rounded(x: Tensor) -> np.ndarray:
    """What the kernels make of rows: whole multiples of a 32,767th of the largest of each 32."""
    parts = x.numpy().reshape(len(x), -1, 32)
    most = np.abs(parts).max(-1, keepdims=True)
    factor = np.divide(np.float32(MOST), most, out=np.zeros_like(most), where=most >= 2.0**-100)
    return (np.rint(parts * factor) * (most / np.float32(MOST)).astype(np.float64)).reshape(x.shape)


def inputs(rows: int) -> Tensor:
    x = torch.randn(rows, DEPTH, generator=torch.Generator().manual_seed(rows))
    x[0] = 0.0
    x[1, 5::32] *= 1000.0  # outliers
    x[2, :32] = 1e-38  # too small to be told from zero
    x[3] = 127.0  # with -128 in the weights, the largest sums there are
    return x


@pytest.mark.parametrize("kind", list(BLOCK))
@pytest.mark.parametrize("columns", [16, 50, 1])
def test_products_of_the_rounded_rows(machine: Machine, kind: Kind, columns: int) -> None:
    """Nothing but the rows is rounded, and float32 sums of blocks in their order: 40 or 80 of them."""
    rows, x = blocks(kind, columns), inputs(40)
    weight, near = values(kind, rows), rounded(x)
    error = np.abs(machine.linear(x, pack(machine, kind, rows)).numpy() - near @ weight.T)
    assert (error <= 1e-6 * (np.abs(near) @ np.abs(weight.T)) * 4 + 1e-30).all()


@pytest.mark.parametrize("kind", list(BLOCK))
def test_error_of_the_rounding(machine: Machine, kind: Kind) -> None:
    """At most half a step, the largest entry of 32 over twice `MOST`, times the weight, for each entry."""
    rows, x = blocks(kind, 50), inputs(40)
    weight = values(kind, rows)
    step = np.abs(x.numpy().reshape(40, -1, 32)).max(-1).repeat(32, 1) / MOST
    bound = step / 2 @ np.abs(weight.T)
    exact = x.double().numpy() @ weight.T
    error = np.abs(machine.linear(x, pack(machine, kind, rows)).numpy() - exact)
    assert (error <= bound * 1.0001 + 4e-6 * (np.abs(x.numpy()) @ np.abs(weight.T))).all()
    assert error.mean() < bound.mean() / 5


@pytest.mark.parametrize("kind", list(BLOCK))
def test_a_row_is_the_same_bits_in_any_company(machine: Machine, variant: str, kind: Kind) -> None:
    x, packed = inputs(97), pack(machine, kind, blocks(kind, 50))
    whole = machine.linear(x, packed)
    for count in range(1, 97):
        assert torch.equal(machine.linear(x[:count], packed), whole[:count])
    for threads in (1, 3, 4):
        assert torch.equal(Machine(threads, library_of(variant)).linear(x, packed), whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(BLOCK))
def test_wider_registers_give_the_same_bits(kind: Kind) -> None:
    """Registers of 8 words, and of 16."""
    if not {"avx2", "wide"} <= set(runnable_variants()):
        pytest.skip("needs AVX2")
    rows, x = blocks(kind, 50), inputs(21)
    narrow, wide = (Machine(1, library_of(name)) for name in ("avx2", "wide"))
    assert torch.equal(narrow.linear(x, pack(narrow, kind, rows)), wide.linear(x, pack(wide, kind, rows)))


def test_variants_round_rows_alike(machine: Machine) -> None:
    """Weights that pick single entries: a product then is what a row was rounded to."""
    rows = np.zeros((DEPTH, DEPTH // 32, 34), np.uint8)
    rows[:, :, :2] = np.float16([1.0]).view(np.uint8)
    for k in range(DEPTH):
        rows[k, k // 32, 2 + k % 32] = 1
    x = inputs(20)
    x[4] = torch.arange(DEPTH) % 255 * 128 - 16256 + 0.5  # ties
    wanted = rounded(x).astype(np.float32)
    got = machine.linear(x, pack(machine, Kind.Q8_0, rows.reshape(DEPTH, -1))).numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(machine: Machine, bad: float) -> None:
    packed = pack(machine, Kind.Q4_1, blocks(Kind.Q4_1, 20))
    x = inputs(6)
    clean = machine.linear(x, packed)
    x[4, 700] = bad
    got = machine.linear(x, packed)
    assert got[4].isnan().all()
    assert torch.equal(got[[0, 1, 2, 3, 5]], clean[[0, 1, 2, 3, 5]])


@pytest.mark.parametrize("kind", list(BLOCK))
def test_best_columns_and_gates(machine: Machine, kind: Kind) -> None:
    rows, x = blocks(kind, 200), torch.randn(9, DEPTH) * 1e-3
    packed = pack(machine, kind, rows)
    assert torch.equal(machine.best_columns(x, packed), machine.argmax(machine.linear(x, packed)))
    gate, up = torch.from_numpy(rows[:100]), torch.from_numpy(rows[100:])
    joined = machine.pack(pair(gate, up), kind, DEPTH, integer=True)
    left, right = (machine.linear(x, pack(machine, kind, part.numpy())) for part in (gate, up))
    got = machine.linear(x, joined, epilogue=Epilogue.SILU_MUL)[:, :100]
    torch.testing.assert_close(got, torch.nn.functional.silu(left) * right, rtol=1e-5, atol=1e-5)
