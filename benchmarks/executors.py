"""What a step costs beside the model, by executor: from handing it over to having its result, less the worker's step.

    python -m benchmarks.executors models/tiny --ranks 2 --rounds 3 --json executors.json

Each executor gets the same steps of a tiny model, one after the other: `uni` in this process, `mp` and `ray` with as
many ranks as `--ranks` says. The worker's own time, in which the collectives are, comes with each result. Executors
take turns; the median of the steps counts, and its difference to `uni`.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

from rayllm.config.engine import EngineConfig
from rayllm.config.load import load
from rayllm.config.parallel import ParallelSettings
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.executor.base import Executor, build_executor
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.worker import StartRow, StepPlan

PROMPT = 16
WARM_UP = 20


def measure(config: EngineConfig, streams: int, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each step beside the worker, and in the worker."""
    executor = build_executor(config)
    try:
        executor.allocate(streams * 64)
        return _run(executor, config.block_size, streams, steps)
    finally:
        executor.shutdown()


def _run(executor: Executor, block_size: int, streams: int, steps: int) -> tuple[list[float], list[float]]:
    blocks = -(-(PROMPT + steps + 1) // block_size)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps)
    rows = list(range(streams))
    starts = [
        StartRow(row, list(range(5 + row, 5 + row + PROMPT)), PROMPT, 0, [row * blocks + i for i in range(blocks)],
                 sampling, 0)
        for row in rows
    ]  # fmt: skip
    beside, inside = [], []
    for step in range(steps):
        counts = [PROMPT if step == 0 else 1] * streams
        began = time.perf_counter()
        result = executor.submit(StepPlan(step, starts if step == 0 else [], [], rows, counts)).result()
        spent = time.perf_counter() - began
        if step >= WARM_UP:
            beside.append(1e3 * (spent - result.times[1]))
            inside.append(1e3 * result.times[1])
    return beside, inside


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import ray

    ray.init(include_dashboard=False, num_gpus=0, log_to_driver=False, logging_level="ERROR")
    flags = [args.model, "--dtype", "float32", "--max-model-len", "1024", "--no-use-tqdm-on-load"]
    base = load(parse_arguments(flags, registry())).engine
    figures: dict[str, dict[str, list[float]]] = {}
    for round_ in range(args.rounds):
        for name in ("uni", "mp", "ray"):
            ranks = 1 if name == "uni" else args.ranks
            config = replace(base, parallel=ParallelSettings(tensor=ranks, executor=name))
            beside, inside = measure(config, args.streams, args.steps)
            entry = figures.setdefault(name, {"beside_ms": [], "worker_ms": []})
            entry["beside_ms"].append(statistics.median(beside))
            entry["worker_ms"].append(statistics.median(inside))
            print(f"round {round_ + 1}: {name}: {entry['beside_ms'][-1]:.3f} ms beside the worker, "
                  f"{entry['worker_ms'][-1]:.3f} ms in it", flush=True)  # fmt: skip
    ray.shutdown()
    uni = statistics.median(figures["uni"]["beside_ms"])
    print(f"\n| executor | ranks | beside the worker (ms) | over uni (ms) | in the worker (ms) |\n|---|{'---:|' * 4}")
    for name, entry in figures.items():
        beside_ms, worker_ms = (statistics.median(entry[key]) for key in ("beside_ms", "worker_ms"))
        ranks = 1 if name == "uni" else args.ranks
        print(f"| {name} | {ranks} | {beside_ms:.3f} | {beside_ms - uni:.3f} | {worker_ms:.3f} |")
    if args.json:
        args.json.write_text(json.dumps({"streams": args.streams, "executors": figures}))


if __name__ == "__main__":
    main()
