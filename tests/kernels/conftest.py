"""Every version of the operations that this machine can run: `ops` runs a test on each.

Triton's stand among them where its interpreter is on, which must be said before Triton is imported: `test_triton.py`
starts a process for that.
"""

import os
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from rayllm_kernels import REFERENCE, Ops, select
from rayllm_kernels.native import build
from rayllm_kernels.native.library import load
from rayllm_kernels.native.ops import NativeOps
from rayllm_kernels.table import ALL


@cache
def runnable_variants() -> list[str]:
    """Variants of the compiled kernels that this CPU runs; none without a compiler."""
    try:
        build.compiler()
    except build.NoCompiler:
        return []
    features = build.cpu_features()
    return [variant.name for variant in (*build.runnable(features), build.WIDE) if variant.needs <= features]


def library_of(variant: str) -> Any:
    """The compiled kernels of a variant."""
    return load(next(one for one in (*build.VARIANTS, build.WIDE) if one.name == variant))


@cache
def native(variant: str, threads: int = 1) -> Ops:
    """The instructions of one variant."""
    methods = NativeOps(threads, library_of(variant))
    return Ops(**{name: getattr(methods, name) for name in ALL})


def variants() -> list[object]:
    """As parameters; the slow ones are marked, as they may have to be compiled first."""
    return [pytest.param(name, marks=pytest.mark.slow if i else ()) for i, name in enumerate(runnable_variants())]


INTERPRETED = ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else []


@pytest.fixture(params=["reference", "cpu", *variants(), *INTERPRETED])
def ops(request: pytest.FixtureRequest) -> Ops:
    """A table."""
    match request.param:
        case "reference":
            return REFERENCE
        case "cpu":
            return select("cpu")
        case "triton":
            from rayllm_kernels import triton

            return replace(REFERENCE, **{name: getattr(triton, name) for name in triton.__all__})
        case variant:
            return native(variant)


@pytest.fixture(params=variants(), scope="module")
def variant(request: pytest.FixtureRequest) -> str:
    """The name of a variant of the compiled kernels."""
    return request.param
