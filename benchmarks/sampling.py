"""How long it takes to choose tokens: compiled kernels beside the reference.

    python -m benchmarks.sampling --threads 2

Rows are random logits with a few likely tokens, as a model's are, or with `--flat` normal ones, where filters have most
to do. Milliseconds for a step of so many rows; the last line is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels import best_seconds
from rayllm_kernels.native.library import Machine, library
from rayllm_kernels.sampling import REFERENCE, Draws, Penalties, SamplingOps

ROWS = (1, 16, 64)
VOCABULARIES = (49152, 151936)
CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k=50": {"top_k": 50},
    "top_p=0.9": {"top_p": 0.9},
    "top_k=50 top_p=0.9": {"top_k": 50, "top_p": 0.9},
    "min_p=0.05": {"min_p": 0.05},
    "logprobs=5": {"temperature": 0.0, "logprobs": 5},
    "penalties": {"temperature": 0.0, "penalties": 1},
}


def sample(ops: SamplingOps, logits_RV: torch.Tensor, case: dict[str, float]) -> Callable[[], object]:
    """What a step does in this case; penalties are those of rows with 500 tokens."""
    rows, vocab = logits_RV.shape
    draws = Draws(
        np.full(rows, case.get("temperature", 0.8), np.float32), np.full(rows, case.get("min_p", 0.0)),
        np.full(rows, case.get("top_k", 0), np.int64), np.full(rows, case.get("top_p", 1.0)),
        np.arange(rows, dtype=np.uint64),
    )  # fmt: skip
    every = np.arange(rows)
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, 500)).astype(np.int32)
    some = np.full(rows, 1e-6, np.float32)  # hardly anything, since the same logits are penalised time and again
    penalties = Penalties(
        every, tokens, every, np.full(rows, 100), np.full(rows, 500), np.float32(1) + some, some, some
    )

    def step() -> object:
        if "penalties" in case:
            ops.penalise(logits_RV, penalties)
        chosen = ops.choose(logits_RV, draws)
        if "logprobs" in case:
            ops.log_probabilities(logits_RV, every, chosen.numpy(), int(case["logprobs"]))
        return chosen

    return step


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.2, help="at least, for each figure")
    args = parser.parse_args(argv)
    if library() is None:
        print("no compiled kernels on this machine", file=sys.stderr)
        return 1
    torch.set_num_threads(args.threads)
    native = Machine(args.threads).sampling()
    table = Table("vocabulary", "case", *(f"{name}, {rows}" for rows in ROWS for name in ("ms native", "reference")))
    figures = []
    for vocab in VOCABULARIES:
        logits_RV = torch.randn(max(ROWS), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
        if not args.flat:
            logits_RV[:, ::997] += 12
        for name, case in CASES.items():
            line = []
            for rows in ROWS:
                ms = {
                    which: 1e3 * best_seconds(sample(ops, logits_RV[:rows], case), args.seconds)
                    for which, ops in (("native", native), ("reference", REFERENCE))
                }
                figures.append({"vocabulary": vocab, "case": name, "rows": rows, **ms})
                line += [f"{ms['native']:.2f}", f"{ms['reference']:.1f}"]
            table.add_row(str(vocab), name, *line)
    Console(stderr=True).print(table)
    print(json.dumps({"threads": args.threads, "flat": args.flat, "figures": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
