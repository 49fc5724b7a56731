"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for the GPUs that they are for."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
LIMIT_S = 900
ARCHITECTURES = (80, 90, 100)
SHARED_BYTES = {80: 166912, 90: 232448, 100: 232448}
"""What a program may take, by architecture."""
SCALARS = {"eps": "fp32", "scale": "fp32", "cap": "fp32"}
POINTERS = {
    "table": "*i32", "query_start": "*i32", "seq_lens": "*i32", "slots": "*i64", "parts": "*fp32", "sinks": "*fp32",
    "angles": "*fp32", "sources": "*i64", "tile_experts": "*i64", "tile_rows": "*i64", "tile_ends": "*i64",
}  # fmt: skip
DATA = {"x", "residual", "weight", "out", "q", "k", "v", "keys", "values", "gate_up", "bias"}


@pytest.mark.parametrize(
    ("part", "only"),
    [
        ("ops", "test"),
        ("experts", "test"),
        ("attention", "half"),
        pytest.param("attention", "test", marks=pytest.mark.long),
    ],
)
def test_under_the_interpreter(part: str, only: str) -> None:
    """The tests of all versions, in a process where Triton is interpreted. All of attention's take minutes.

    Not in bfloat16: the interpreter cuts instead of rounding, and multiplies matrices of bit patterns.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / f"test_{part}.py")]
    done = subprocess.run(
        [*command, "-k", f"triton and not bfloat16 and {only}", "-m", "slow or not slow"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=HERE.parents[1], capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def attention_shapes(heads: tuple[int, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    from rayllm_kernels.triton.attention import ROWS, SPLIT, TOKENS

    flags = {"M": ROWS, "L": TOKENS, "S": SPLIT}
    for head in heads:
        for partial in (False, True):
            yield (
                f"attention_kernel {head} {partial}",
                flags | {"PARTIAL": partial, "SINGLES": False, "CAP": True, "SINKS": True, "BLOCK_H": head},
            )
        yield f"join_kernel {head}", {"SINKS": True, "S": SPLIT, "BLOCK_H": head}
    yield "write_kernel", {"BLOCK_H": 128}


def row_shapes() -> Iterator[tuple[str, dict[str, Any]]]:
    for add in (False, True):
        yield f"norm_kernel {add}", {"ADD": add, "PLUS_ONE": True, "BLOCK": 8192}
    for gelu in (False, True):
        yield f"gated_kernel {gelu}", {"GELU": gelu, "BLOCK": 1024}
    yield "rotary_kernel", {"BLOCK": 64}


def expert_shapes() -> Iterator[tuple[str, dict[str, Any]]]:
    from rayllm_kernels.triton.grouped import COLUMNS, DEPTH, ROWS

    for bias in (False, True):
        yield f"grouped_kernel {bias}", {"BIAS": bias, "M": ROWS, "N": COLUMNS, "K": DEPTH}


@pytest.mark.parametrize(
    ("architecture", "dtype", "heads"),
    [
        *((one, "bf16", (64, 128)) for one in ARCHITECTURES),
        (80, "fp16", (64,)),
        (80, "fp32", (64,)),
        (90, "bf16", (256,)),
    ],
)
def test_compiles_ahead(
    architecture: int, dtype: str, heads: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rayllm_kernels.triton import attention, grouped, rows

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    for module, shapes in ((attention, attention_shapes(heads)), (rows, row_shapes()), (grouped, expert_shapes())):
        for name, constants in shapes:
            kernel = getattr(module, name.split()[0])
            types = {
                argument: "constexpr"
                if argument in constants
                else POINTERS.get(argument) or SCALARS.get(argument) or (f"*{dtype}" if argument in DATA else "i32")
                for argument in kernel.arg_names
            }
            source = ASTSource(kernel, types, constants)
            target, warps = GPUTarget("cuda", architecture, 32), 8 if constants.get("BLOCK_H", 0) > 128 else 4
            compiled = triton.compile(source, target=target, options={"num_warps": warps})
            assert compiled.asm["cubin"], name
            assert compiled.metadata.shared <= SHARED_BYTES[architecture], name
