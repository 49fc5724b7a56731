"""How near the CPU kernels come to the machine's limits: bandwidth for few rows, arithmetic for many.

    python benchmarks/kernels.py --threads 2

For each storage of weights and number of rows: milliseconds, GFLOP/s and GB/s of weights read. The limits beside them
are measured in the same run: a plain read of memory, and the best product seen. The last line is one JSON object.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from rayllm_kernels.native.library import BLOCK, Kind, Machine, Packed, library

ROWS = (1, 4, 16, 64, 512)
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


def weights(machine: Machine, kind: Kind, n: int, k: int) -> Packed:
    """A matrix in a storage; its values do not matter for speed."""
    if kind in DTYPES:
        return machine.pack((torch.randn(n, k) * 0.02).to(DTYPES[kind]))
    entries, size = BLOCK[kind]
    return machine.pack(torch.zeros(n, k // entries * size, dtype=torch.uint8), kind, k)


def read_bandwidth(threads: int) -> float:
    """GB/s of summing an array that no cache holds."""
    torch.set_num_threads(threads)
    array = torch.ones(64 << 20)
    return array.numel() * 4 / best_seconds(lambda: array.sum()) / 1e9


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--columns", type=int, default=49152, help="rows of the stored matrix")
    parser.add_argument("--depth", type=int, default=768)
    args = parser.parse_args(argv)
    if library() is None:
        print("no compiled kernels on this machine", file=sys.stderr)
        return 1
    machine = Machine(args.threads)
    bandwidth = read_bandwidth(args.threads)
    table = Table("storage", "rows", "ms", "GFLOP/s", "GB/s", title=f"memory reads run at {bandwidth:.1f} GB/s")
    figures = []
    for kind in Kind:
        packed = weights(machine, kind, args.columns, args.depth)
        for rows in ROWS:
            x = torch.randn(rows, args.depth)
            seconds = best_seconds(lambda packed=packed, x=x: machine.linear(x, packed))
            flops = 2 * rows * args.columns * args.depth / seconds / 1e9
            read = packed.data.numel() / seconds / 1e9
            figures.append({"kind": kind.name, "rows": rows, "ms": seconds * 1e3, "gflop_s": flops, "gb_s": read})
            table.add_row(kind.name, str(rows), f"{seconds * 1e3:.2f}", f"{flops:.0f}", f"{read:.1f}")
    Console(stderr=True).print(table)
    print(json.dumps({"threads": args.threads, "read_gb_s": bandwidth, "products": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
