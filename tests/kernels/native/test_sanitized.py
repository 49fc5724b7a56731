"""The tests of the compiled kernels, run on a build that stops at the first bad address or undefined operation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayllm_kernels.native import build

TESTS = Path(__file__).parents[1]
LIMIT_S = 1500
RUN = """
import sys, pytest
from rayllm_kernels.native import build, library
variant = next(one for one in build.VARIANTS if one.name == sys.argv[1])
build.VARIANTS = (build.sanitized(variant),)
library.computes_right = lambda path, variant: True
code = pytest.main(["-x", "-p", "no:cacheprovider", "-m", "not long and not slow", "--capture=sys", *sys.argv[2:]])
assert library.library() is library.load(build.VARIANTS[0])
sys.exit(code)
"""


def runtime(name: str) -> Path:
    """A library of the compiler's own."""
    done = subprocess.run([build.compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.mark.long
@pytest.mark.parametrize("variant", build.VARIANTS, ids=lambda variant: variant.name)
def test_no_bad_address_and_nothing_undefined(variant: build.Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    if not variant.needs <= build.cpu_features():
        pytest.skip("this CPU cannot run it")
    try:
        found = runtime("libasan.so")
    except build.NoCompiler:
        pytest.skip("no C++ compiler here")
    if not found.is_file():
        pytest.skip("the compiler has no libasan")
    monkeypatch.setattr(build, "TIMEOUT_S", LIMIT_S)
    build.build(build.sanitized(variant), build.cache_folder(), print)  # here, where the compiler runs without it
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{found} {runtime('libstdc++.so')}",
        # Python itself leaves memory behind, and torch frees what a C++ library it loaded allocated.
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    tests = [str(TESTS), f"--ignore={TESTS}/native/test_build.py", str(TESTS.parent / "model" / "test_compiled.py")]
    done = subprocess.run(
        [sys.executable, "-c", RUN, variant.name, *tests],
        env=environment, cwd=TESTS.parents[1], capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    report = f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert done.returncode == 0, report
    assert "Sanitizer" not in report, report
