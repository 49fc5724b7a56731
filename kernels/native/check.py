"""`python -m rayllm_kernels.native.check VARIANT`: fail where a build computes wrong numbers on this CPU.

Not every instruction set can be tested where the kernels are developed, so a build is tried before its first use.
"""

import sys

import torch

from rayllm_kernels.native.build import VARIANTS, Variant
from rayllm_kernels.native.library import Epilogue, Machine, load

SIZES = ((48, 576), (33, 51), (16, 1030))


def check(variant: Variant) -> None:
    """Compare products and activations with float64.

    Raises:
        ValueError: they differ by more than rounding.
    """
    torch.manual_seed(0)
    machine = Machine(2, load(variant))
    for dtype, integer in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float16, True),
    ):
        for n, k in SIZES:
            weight, x = torch.randn(n, k).to(dtype), torch.randn(100, k)
            packed = machine.pack(weight, integer=integer)
            kind = packed.kind
            exact = (x.bfloat16() if machine.rounds_rows(kind) else x).double() @ weight.double().T
            whole = machine.linear(x, packed)
            _close(f"products of {n} x {k} {kind.name}", whole.double(), exact, 1e-3 if integer else 1e-5)
            for rows in (1, 2, 3, 5, 13):
                if not torch.equal(machine.linear(x[:rows], packed), whole[:rows]):
                    raise ValueError(f"products of {n} x {k} {kind.name} depend on the number of rows")
    both = torch.randn(64, 40)
    gate, up = both.view(2, 2, 16, 40).transpose(0, 1).reshape(2, 32, 40)
    x = torch.randn(9, 40)
    exact = torch.nn.functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    _close("SwiGLU", machine.linear(x, machine.pack(both), None, Epilogue.SILU_MUL).double(), exact)


def _close(what: str, got: torch.Tensor, exact: torch.Tensor, most: float = 1e-5) -> None:
    error = float((got - exact).abs().max() / exact.abs().max())
    if not error < most:
        raise ValueError(f"{what} are off by {error:.1e} of the largest")


if __name__ == "__main__":
    check(next(variant for variant in VARIANTS if variant.name == sys.argv[1]))
