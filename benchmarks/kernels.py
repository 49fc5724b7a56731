"""How near the CPU kernels come to the machine's limits: bandwidth for few rows, arithmetic for many.

    python -m benchmarks.kernels --threads 2 --json kernels.json

For each storage of weights (integers: of rows rounded to two bytes) and number of rows: milliseconds, GFLOP/s and GB/s
of weights read. The limits beside them are measured in the same run: a plain read of memory, and multiply-adds of
floats on registers alone. The last line is one JSON object, which `--json` also writes to a file.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import machine_name
from rayllm_kernels.native.build import compiler
from rayllm_kernels.native.library import BLOCK, Kind, Machine, Packed, library

ROWS = (1, 4, 16, 64, 512)
LAYER_COLUMNS = 3072
"""Of the matrix for the most rows: those of a vocabulary would measure the writing of 100 MB of results."""
DTYPES = {Kind.F32: torch.float32, Kind.BF16: torch.bfloat16, Kind.F16: torch.float16}


def best_seconds(call: Callable[[], object], at_least: float = 0.3) -> float:
    """The shortest of the runs that fit into `at_least` seconds, and of three at least."""
    call()
    best, began, runs = float("inf"), time.perf_counter(), 0
    while runs < 3 or time.perf_counter() - began < at_least:
        start = time.perf_counter()
        call()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best


def weights(machine: Machine, kind: Kind, integer: bool, n: int, k: int) -> Packed:
    """A matrix in a storage; its values do not matter for speed."""
    if kind is Kind.I16:
        return machine.pack(torch.randn(n, k).half(), integer=True)
    if kind in DTYPES:
        return machine.pack((torch.randn(n, k) * 0.02).to(DTYPES[kind]))
    entries, size = BLOCK[kind]
    return machine.pack(torch.zeros(n, k // entries * size, dtype=torch.uint8), kind, k, integer=integer)


def read_bandwidth(threads: int) -> float:
    """GB/s of summing an array that no cache holds."""
    torch.set_num_threads(threads)
    array = torch.ones(64 << 20)
    return array.numel() * 4 / best_seconds(lambda: array.sum(), at_least=1.0) / 1e9


def fma_peak(threads: int, steps: int = 5_000_000) -> float:
    """GFLOP/s of float32 multiply-adds that touch no memory, in the widest vectors of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "peak.so"
        flags = ("-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")
        subprocess.run([compiler(), *flags, str(Path(__file__).with_name("peak.cpp")), "-o", str(built)], check=True)
        multiply_adds = ctypes.CDLL(str(built)).multiply_adds
    multiply_adds.argtypes, multiply_adds.restype = (ctypes.c_int, ctypes.c_long), ctypes.c_double
    operations = multiply_adds(threads, steps)
    return operations / best_seconds(lambda: multiply_adds(threads, steps), at_least=1.0) / 1e9


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--columns", type=int, default=49152, help="rows of the stored matrix")
    parser.add_argument("--depth", type=int, default=768)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    if library() is None:
        print("no compiled kernels on this machine", file=sys.stderr)
        return 1
    machine = Machine(args.threads)
    bandwidth, peak = read_bandwidth(args.threads), fma_peak(args.threads)
    title = f"memory reads run at {bandwidth:.1f} GB/s, multiply-adds at {peak:.0f} GFLOP/s"
    table = Table("storage", "rows", "ms", "GFLOP/s", "GB/s", title=title)
    figures = []
    for kind, integer in [(kind, False) for kind in (*DTYPES, *BLOCK)] + [(kind, True) for kind in (Kind.I16, *BLOCK)]:
        name = f"{kind.name}, integers" if integer else kind.name
        for rows in ROWS:
            columns = args.columns if rows < ROWS[-1] else min(args.columns, LAYER_COLUMNS)
            packed = weights(machine, kind, integer, columns, args.depth)
            x = torch.randn(rows, args.depth)
            seconds = best_seconds(lambda packed=packed, x=x: machine.linear(x, packed))
            flops = 2 * rows * columns * args.depth / seconds / 1e9
            read = packed.data.numel() / seconds / 1e9
            measured = {"ms": seconds * 1e3, "gflop_s": flops, "gb_s": read}
            figures.append({"kind": name, "rows": rows, **measured})
            table.add_row(name, str(rows), f"{seconds * 1e3:.2f}", f"{flops:.0f}", f"{read:.1f}")
    Console(stderr=True).print(table)
    limits = {"read_gb_s": bandwidth, "fma_gflop_s": peak}
    text = json.dumps({"threads": args.threads, "machine": machine_name(), **limits, "products": figures})
    if args.json:
        args.json.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
