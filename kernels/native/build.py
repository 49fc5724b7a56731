"""Compiles the CPU kernels for the machine they run on, once, and finds what was compiled before.

A build is named by the sources, the flags and the compiler, so a changed kernel is never mistaken for an old one.
Several processes may ask at the same moment: one compiles, the others wait for it.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=c++20", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set: what a CPU must have for it, and the flags that use it."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512_FLAGS = (
    *_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512",
)  # fmt: skip
VARIANTS = (
    Variant("avx512-bf16", _AVX512 | {"avx512_bf16", "avx512_vnni"}, (*_AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni")),
    Variant("avx512", _AVX512, _AVX512_FLAGS),
    Variant("avx2", _AVX2, _AVX2_FLAGS),
    Variant("portable", frozenset(), ()),
)
"""From the fastest; the last runs everywhere."""
WIDE = Variant("wide", _AVX2, (*_AVX2_FLAGS, "-DRK_WIDTH=16", "-DRK_BF16_DOT"))
"""What `avx512-bf16` does, in the instructions of AVX2. For tests; never chosen."""


def sanitized(variant: Variant) -> Variant:
    """A variant that ends the process at the first bad address or undefined operation. For tests; never chosen.

    The process must have been started with GCC's libasan in LD_PRELOAD.
    """
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
    return Variant(f"{variant.name}-sanitized", variant.needs, (*variant.flags, *flags))


class NoCompiler(Exception):
    """The kernels were not compiled before and cannot be now."""


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets of this CPU, as Linux names them; none where it does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":")[1].split()) for line in lines if line.startswith("flags")), frozenset())


def runnable(features: frozenset[str]) -> list[Variant]:
    """The variants that a CPU can run, from the fastest."""
    return [variant for variant in VARIANTS if variant.needs <= features]


def cache_folder() -> Path:
    """Where builds are kept: in the user's cache, which XDG_CACHE_HOME moves."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rayllm" / "kernels"


@cache
def compiler() -> str:
    """The C++ compiler.

    Raises:
        NoCompiler: there is none.
    """
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return path
    raise NoCompiler("no C++ compiler was found; install g++")


def build(variant: Variant, folder: Path, say: Callable[[str], None]) -> Path:
    """The shared library of a variant, compiled if it was not before.

    Raises:
        NoCompiler: there is no compiler, it fails, or the folder cannot be written.
    """
    target = folder / f"{variant.name}-{_fingerprint(variant)}.so"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{target.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_file():
                _compile(variant, target, say)
    except OSError as error:
        raise NoCompiler(f"{folder} cannot be used for compiled kernels: {error}") from error
    return target


def _compile(variant: Variant, target: Path, say: Callable[[str], None]) -> None:
    work = target.with_suffix(f".{os.getpid()}.tmp")
    say(f"compiling the CPU kernels for {variant.name} (once, some 10 seconds)")
    began = time.monotonic()
    command = [compiler(), *FLAGS, *variant.flags, str(SOURCES / "cpu.cpp"), "-o", str(work)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoCompiler(f"{compiler()} took more than {TIMEOUT_S} s") from error
    if done.returncode:
        raise NoCompiler(f"{compiler()} failed on the CPU kernels: {done.stderr.strip()[-2000:]}")
    work.rename(target)
    say(f"compiled the CPU kernels in {time.monotonic() - began:.0f} s")


def _fingerprint(variant: Variant) -> str:
    digest = hashlib.sha256(repr((FLAGS, variant.flags)).encode())
    for path in sorted(SOURCES.glob("*.h")) + sorted(SOURCES.glob("*.cpp")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
