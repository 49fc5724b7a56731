"""Compiled products against torch, over odd sizes, every storage and every number of rows."""

import gguf
import numpy as np
import pytest
import torch

from rayllm_kernels.native.library import BLOCK, Epilogue, Kind, Machine, pair
from tests.kernels.conftest import library_of

SIZES = ((576, 576), (33, 50), (1000, 1537), (16, 8), (1, 1), (70, 511))


@pytest.fixture(scope="module")
def machine(variant: str) -> Machine:
    return Machine(2, library_of(variant))


@pytest.fixture(scope="module")
def lone(variant: str) -> Machine:
    """The same kernels with one thread."""
    return Machine(1, library_of(variant))


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-6) -> bool:
    return bool((got - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_linear(machine: Machine, lone: Machine, dtype: torch.dtype, n: int, k: int) -> None:
    torch.manual_seed(n)
    weight, bias, x = torch.randn(n, k).to(dtype), torch.randn(n), torch.randn(130, k)
    packed = machine.pack(weight)
    whole = machine.linear(x, packed, bias)
    taken = x.bfloat16() if machine.rounds_rows(packed.kind) else x
    assert close(whole, (taken.double() @ weight.double().T + bias).float(), 1e-5)
    for rows in (*range(1, 20), 64, 97):
        assert torch.equal(machine.linear(x[:rows], packed, bias), whole[:rows]), "a row depends on its neighbours"
    assert torch.equal(lone.linear(x, packed, bias), whole), "a result depends on the threads"


@pytest.mark.parametrize("n", [16, 100, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_gated(machine: Machine, n: int, bias: bool) -> None:
    gate, up, x = torch.randn(n, 64), torch.randn(n, 64), torch.randn(9, 64)
    b = (torch.randn(n), torch.randn(n)) if bias else None
    packed = machine.pack(pair(gate, up))
    joined = None if b is None else pair(b[0][:, None], b[1][:, None])[:, 0].contiguous()
    left, right = x @ gate.T + (b[0] if b else 0), x @ up.T + (b[1] if b else 0)
    for epilogue, act in (
        (Epilogue.SILU_MUL, torch.nn.functional.silu),
        (Epilogue.GELU_MUL, lambda v: torch.nn.functional.gelu(v, approximate="tanh")),
    ):
        assert close(machine.linear(x, packed, joined, epilogue)[:, :n], act(left) * right)


def test_gates_of_any_size(machine: Machine) -> None:
    gate = torch.tensor([[-1e6, -200.0, -90.0, -88.5, -80.0, 0.0, 90.0, 1e30]]).T.repeat(1, 4)
    packed = machine.pack(pair(gate, torch.ones(8, 4)))
    got = machine.linear(torch.full((1, 4), 0.25), packed, None, Epilogue.SILU_MUL)[0, :8]
    torch.testing.assert_close(got, torch.nn.functional.silu(gate[:, 0]), atol=1e-30, rtol=1e-5)


def random_blocks(kind: Kind, rows: int, depth: int) -> np.ndarray:
    """Quantized rows of random bytes with sane scales."""
    entries, size = BLOCK[kind]
    rng = np.random.default_rng(int(kind))
    raw = rng.integers(0, 256, (rows, depth // entries, size), dtype=np.uint8)
    scales = rng.normal(0, 0.1, (rows, depth // entries, 2)).astype(np.float16).view(np.uint8).reshape(rows, -1, 4)
    if kind is Kind.Q6_K:
        raw[:, :, 208:210] = scales[:, :, :2]
    else:
        wide = 4 if kind in (Kind.Q4_1, Kind.Q4_K) else 2
        raw[:, :, :wide] = scales[:, :, :wide]
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", list(BLOCK))
def test_quantized(machine: Machine, kind: Kind) -> None:
    rows = random_blocks(kind, 50, 1280)
    weight = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind.name]))
    x = torch.randn(110, 1280)
    packed = machine.pack(torch.from_numpy(rows), kind, 1280)
    whole = machine.linear(x, packed)
    assert close(whole, x @ weight.T, 1e-5)
    for count in (1, 2, 3, 7, 12, 97):
        assert torch.equal(machine.linear(x[:count], packed), whole[:count])


@pytest.mark.parametrize("integer", [False, True])
def test_outputs_are_written_and_nothing_else(machine: Machine, variant: str, integer: bool) -> None:
    """A poisoned output: every number is overwritten, and the columns beside it stay."""
    packed = machine.pack(torch.randn(37, 20).half(), integer=integer)
    x = torch.randn(11, 20)
    room = torch.full((11, 60), float("nan"))
    library_of(variant).rk_linear(
        machine.handle, packed.kind, integer, packed.address, 0, 0, 37, 20, x.data_ptr(), 20, 11, room.data_ptr(), 60
    )
    assert not room[:, :37].isnan().any()
    assert room[:, 37:].isnan().all()


@pytest.mark.parametrize("n", [1, 7, 8, 49152, 1003])
def test_argmax_takes_the_first_of_equals(machine: Machine, n: int) -> None:
    x = torch.randint(-5, 5, (9, n)).float()
    x[0] = float("-inf")
    wanted = [row.tolist().index(max(row.tolist())) for row in x]
    assert machine.argmax(x).tolist() == wanted


@pytest.mark.parametrize(("n", "k"), [(49152, 64), (1003, 50), (5, 8), (40, 1537)])
@pytest.mark.parametrize("rows", [1, 3, 64, 130])
@pytest.mark.parametrize("integer", [False, True])
def test_best_columns_are_the_argmax_of_the_products(
    machine: Machine, lone: Machine, n: int, k: int, rows: int, integer: bool
) -> None:
    weight = torch.randint(-2, 3, (n, k)).bfloat16()  # small whole numbers, so that there are equals
    packed, x = machine.pack(weight, integer=integer), torch.randint(-2, 3, (rows, k)).float()
    assert torch.equal(machine.best_columns(x, packed), machine.argmax(machine.linear(x, packed)))
    assert torch.equal(lone.best_columns(x, packed), machine.best_columns(x, packed))
