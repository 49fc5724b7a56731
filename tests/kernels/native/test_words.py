"""Products of weights in whole numbers of 16 bits: the error of rounding, extremes, and the same bits everywhere."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rayllm_kernels.native.library import Epilogue, Kind, Machine, Packed, pair
from tests.kernels.conftest import library_of, runnable_variants
from tests.kernels.native.test_products import SIZES

WORDS = 64
LONGEST, LARGEST = 46000.0, 32767.0


@pytest.fixture(scope="module")
def machine(variant: str) -> Machine:
    return Machine(2, library_of(variant))


def pack(machine: Machine, weight: Tensor) -> Packed:
    """In words; in float16, which no build multiplies by itself."""
    packed = machine.pack(weight.half(), integer=True)
    assert packed.kind is Kind.I16
    return packed


def steps(x: np.ndarray) -> np.ndarray:
    """The step of each 64 entries of rows, (rows, blocks)."""
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, -x.shape[1] % WORDS))).reshape(len(x), -1, WORDS)
    most, length = np.abs(padded).max(-1), np.sqrt((padded**2).sum(-1))
    safe = (most > 2.0**-50) & (most < 2.0**50)  # else the longest that it can be
    return np.maximum(most / LARGEST, np.where(safe, length, most * 8) / LONGEST)


def bound(x: Tensor, weight: Tensor) -> np.ndarray:
    """The most that a product may be off: half a step for each entry of a row, and of a column, times the other."""
    rows, columns = x.double().numpy(), weight.double().numpy()
    row_half = steps(rows).repeat(WORDS, 1)[:, : x.shape[1]] / 2
    column_half = steps(columns).max(1, keepdims=True) / 2
    off = row_half @ (np.abs(columns) + column_half).T + np.abs(rows).sum(1, keepdims=True) * column_half.T
    return off * 1.001 + 1e-6 * (np.abs(rows) @ np.abs(columns).T)


def inputs(rows: int, depth: int) -> Tensor:
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows))
    x[0] = 0.0
    x[1, 5::32] *= 1000.0  # outliers
    x[2] *= 1e-25  # squares leave the range of a float
    x[3] *= 1e25
    x[4] = 1.0  # every block as long as it can be
    return x


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_of_the_rounding(machine: Machine, dtype: torch.dtype, n: int, k: int) -> None:
    weight, x = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(dtype), inputs(60, k)
    packed = machine.pack(weight, integer=True)
    if packed.kind is not Kind.I16:
        pytest.skip("this build multiplies bfloat16 itself")
    exact = x.double().numpy() @ weight.double().numpy().T
    error = np.abs(machine.linear(x, packed).double().numpy() - exact)
    assert (error <= bound(x, weight)).all()
    in_bfloat16 = np.abs(x[5:].bfloat16().double().numpy() @ weight.double().numpy().T - exact[5:])
    assert error[5:].mean() * 8 < in_bfloat16.mean(), "coarser than rows of bfloat16"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_stay_exact(machine: Machine, sign: float) -> None:
    """Rows and columns all alike have the largest sums that there are; single entries are the largest words."""
    alike, single = torch.ones(8, 640), torch.zeros(8, 640)
    single[:, 3::64] = 1.0
    for row in (alike, single):
        for column in (alike, single):
            got = machine.linear(row * 0.37, pack(machine, column * sign * 0.5))
            wanted = (row * 0.37) @ (column * sign * 0.5).T
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_a_row_is_the_same_bits_in_any_company(machine: Machine, variant: str, n: int, k: int) -> None:
    x, packed, bias = inputs(97, k), pack(machine, torch.randn(n, k)), torch.randn(n)
    whole = machine.linear(x, packed, bias)
    for count in (*range(1, 26), 48, 64, 95, 96):
        assert torch.equal(machine.linear(x[:count], packed, bias), whole[:count])
    for threads in (1, 3, 4):
        assert torch.equal(Machine(threads, library_of(variant)).linear(x, packed, bias), whole)


@pytest.mark.slow
def test_wider_registers_give_the_same() -> None:
    """But for the steps, as registers of other widths sum the squares in another order."""
    if not {"avx2", "wide"} <= set(runnable_variants()):
        pytest.skip("needs AVX2")
    x, weight = torch.randn(30, 640), torch.randn(50, 640)
    narrow, wide = (Machine(1, library_of(name)) for name in ("avx2", "wide"))
    torch.testing.assert_close(
        narrow.linear(x, pack(narrow, weight)), wide.linear(x, pack(wide, weight)), rtol=0, atol=0.01
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_where_it_is(machine: Machine, bad: float) -> None:
    """In its row, or in its column."""
    weight, x = torch.randn(40, 700), inputs(8, 700)
    clean = machine.linear(x, pack(machine, weight))
    x[6, 650] = weight[33, 2] = bad
    got = machine.linear(x, pack(machine, weight))
    assert got[6].isnan().all()
    assert got[:, 33].isnan().all()
    rows, columns = torch.arange(8) != 6, torch.arange(40) != 33
    assert torch.equal(got[rows][:, columns], clean[rows][:, columns])


def test_gates(machine: Machine) -> None:
    gate, up, x = torch.randn(100, 576), torch.randn(100, 576), torch.randn(9, 576) * 0.1
    left, right = (machine.linear(x, pack(machine, part)) for part in (gate, up))
    got = machine.linear(x, pack(machine, pair(gate, up)), epilogue=Epilogue.SILU_MUL)[:, :100]
    torch.testing.assert_close(got, torch.nn.functional.silu(left) * right, rtol=1e-5, atol=1e-5)
