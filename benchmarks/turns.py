"""Compare this project with peers by turns: round by round, each does the same work right after the other.

    python -m benchmarks.turns programs --ours 'COMMAND' --peer 'llama.cpp=COMMAND' --json programs.json
    python -m benchmarks.turns servers --ours URL --peer vLLM=URL --workloads decode1,c16 --json servers.json

`programs` starts a fresh process for each turn; a command prints its figures as a JSON object on a line of its own, as
`in_process.py` does. `servers` loads two running servers with random token ids, new ones each round, through
`/v1/completions`. Both print ratios, of which the median counts; `benchmarks.report` reads what `--json` writes.
"""

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import serve
from benchmarks.report import comparison_text, machine_name, split

TOKEN_IDS = range(100, 32000)
"""Drawn from: above most models' special tokens, and within their vocabularies."""
LLAMA = re.compile(r"prefill\(1024\) ([\d.]+) tok/s, decode ([\d.]+) tok/s")
FIGURES = {
    "throughput": ("tok_s", lambda run: run["output_tokens_per_s"]),
    "decode": ("tok_s", lambda run: 1e3 / run["tpot_ms"]["p50"]),
    "ttft": ("ttft_ms", lambda run: run["ttft_ms"]["p50"]),
    "requests": ("req_s", lambda run: run["requests_per_s"]),
}
"""Ending of the figure's name, and how it comes from a run of the load client."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of random tokens, `clients` at a time, of which the first `shared` tokens are the same in all."""

    input_tokens: int
    output_tokens: int
    requests: int
    clients: int
    figure: str = "throughput"
    shared: int = 0
    cpu: bool = False
    """Whether the CPU time of the processes is of interest."""


WORKLOADS = {
    "decode1": Workload(32, 256, 4, 1, "decode"),
    "c4": Workload(128, 128, 16, 4),
    "c16": Workload(128, 128, 64, 16),
    "c64": Workload(128, 64, 128, 64),
    "prefill1k": Workload(1024, 2, 12, 1, "ttft"),
    "prefix1k": Workload(32, 2, 12, 1, "ttft", shared=1024),
    # With a model of `tiny_model.py` these show what a server costs outside the model.
    "tiny1": Workload(16, 128, 8, 1, cpu=True),
    "tiny16": Workload(16, 128, 64, 16, cpu=True),
    "tiny64": Workload(16, 128, 192, 64, cpu=True),
    "tiny_one_token": Workload(16, 1, 800, 16, "requests", cpu=True),
}


def figures_in(output: str) -> dict[str, float]:
    """The figures that a command printed: the last JSON object, or a line `prefill(1024) P tok/s, decode D tok/s`.

    Raises:
        ValueError: there are none.
    """
    for line in reversed(output.splitlines()):
        if match := LLAMA.search(line):
            return {"prefill1k_tok_s": float(match[1]), "decode1_tok_s": float(match[2])}
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return {name: value for name, value in found.items() if split(name) and isinstance(value, int | float)}
    raise ValueError("no figures in what it printed")


def run_program(command: str) -> dict[str, float]:
    """Run a command to its end; its figures. Ends this program where it fails."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    try:
        if done.returncode:
            raise ValueError(f"exit status {done.returncode}")
        return figures_in(done.stdout)
    except ValueError as error:
        raise SystemExit(f"{command}: {error}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}") from error


def prompts_of(workload: Workload, seed: str) -> list[list[int]]:
    """Random token ids for every request; those of another seed share no prefix with them."""
    rng = random.Random(seed)
    shared = rng.choices(TOKEN_IDS, k=workload.shared)
    return [shared + rng.choices(TOKEN_IDS, k=workload.input_tokens) for _ in range(workload.requests)]


def run_load(url: str, workload: Workload, seed: str) -> tuple[float, dict[str, float]]:
    """Load a server; the workload's figure, and CPU milliseconds a token by process name. Ends this program at a fault.

    Every client has sent a short request before, so that neither connections nor anything lazy counts.
    """
    once = replace(workload, input_tokens=16, output_tokens=2, requests=workload.clients, shared=0)
    for each, its_seed in ((once, f"{seed} before"), (workload, seed)):
        args = serve.parse([
            url, "--concurrency", str(each.clients), "--output-tokens", str(each.output_tokens), "--warmup", "0",
        ])  # fmt: skip
        before = cpu_seconds()
        requests, seconds = asyncio.run(serve.load(args, prompts_of(each, its_seed)))
        after = cpu_seconds()
        run = serve.summarise(requests, seconds)
        if run["failed"]:
            raise SystemExit(f"{url}: {run['failed']} requests failed: {run['errors']}")
    return FIGURES[workload.figure][1](run), cpu_ms_a_token(before, after, run["output_tokens"])


def cpu_seconds() -> dict[int, tuple[str, float]]:
    """Name and CPU seconds so far of every process but this one and the kernel's own, by process id.

    Linux cuts names to 15 characters; a process that has given itself a longer title is called by its first word.
    """
    used = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # pid (name) state ppid ...; a name may hold spaces and parentheses.
            before, _, after = (folder / "stat").read_text().rpartition(")")
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").partition(" ")[0]
        except OSError:
            continue
        fields = after.split()
        if int(folder.name) != os.getpid() and fields[1] != "2":
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            name = before.partition("(")[2]
            used[int(folder.name)] = title if title.startswith(name) else name, seconds
    return used


def cpu_ms_a_token(
    before: Mapping[int, tuple[str, float]], after: Mapping[int, tuple[str, float]], tokens: int, least: float = 0.02
) -> dict[str, float]:
    """CPU milliseconds a token by process name, of processes with at least a share `least` of the whole."""
    spent: dict[str, float] = {}
    for pid, (name, seconds) in after.items():
        if pid in before:
            spent[name] = spent.get(name, 0.0) + (seconds - before[pid][1]) * 1e3 / tokens
    whole = sum(spent.values())
    return {name: round(ms, 4) for name, ms in spent.items() if ms > 0 and ms >= least * whole}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median by name; where a name is missing it counts as 0."""
    names = dict.fromkeys(name for each in rounds for name in each)
    return {name: statistics.median(each.get(name, 0.0) for each in rounds) for name in names}


def named(text: str) -> tuple[str, str]:
    """A peer of the command line, NAME=WHAT."""
    name, equals, what = text.partition("=")
    if not (name and equals and what):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND or NAME=URL")
    return name, what


def compare_programs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One comparison for each peer. Ours takes one turn a round, then each peer one."""
    sides = {"rayllm": args.ours, **dict(args.peer)}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(args.rounds):
        for name, command in sides.items():
            print(f"round {number + 1}: {name}", file=sys.stderr)
            turns[name].append(run_program(command))
    ours = turns["rayllm"]
    return [
        {
            "title": args.title or "In process", "peer": name, "machine": machine_name(),
            "figures": {
                figure: {"ours": [turn[figure] for turn in ours], "peer": [turn[figure] for turn in turns[name]]}
                for figure in ours[0] if figure in turns[name][0]
            },
        }
        for name, _ in args.peer
    ]  # fmt: skip


def compare_servers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Workload by workload, both servers in each round; who goes first alternates."""
    figures, cpu_ms = {}, {}
    (peer, peer_url) = args.peer
    sides = [("ours", args.ours), ("peer", peer_url)]
    # Never the same twice: no prompt may be cached from an earlier run.
    seed = random.SystemRandom().getrandbits(32)
    for name in args.workloads.split(","):
        workload = WORKLOADS[name]
        if args.requests:
            workload = replace(workload, requests=args.requests)
        values: dict[str, list[float]] = {"ours": [], "peer": []}
        cpu: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
        for number in range(args.rounds):
            print(f"{name}, round {number + 1}", file=sys.stderr)
            for side, url in sides if number % 2 == 0 else reversed(sides):
                # The threads of some servers spin for a while after their last request, at the other's cost.
                time.sleep(args.pause)
                value, spent = run_load(url, workload, f"{seed} {name} {number}")
                values[side].append(round(value, 3))
                cpu[side].append(spent)
        figures[f"{name}_{FIGURES[workload.figure][0]}"] = values
        if workload.cpu:
            cpu_ms[name] = {side: medians(rounds) for side, rounds in cpu.items()}
    title = args.title or "HTTP servers"
    return [{"title": title, "peer": peer, "machine": machine_name(), "figures": figures, "cpu_ms": cpu_ms}]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    programs = kinds.add_parser("programs", help="commands that print their figures")
    programs.add_argument("--ours", required=True, metavar="COMMAND")
    programs.add_argument("--peer", required=True, type=named, action="append", metavar="NAME=COMMAND")
    programs.set_defaults(compare=compare_programs)
    servers = kinds.add_parser("servers", help="running servers")
    servers.add_argument("--ours", required=True, metavar="URL")
    servers.add_argument("--peer", required=True, type=named, metavar="NAME=URL")
    servers.add_argument("--workloads", default="decode1,c4,c16,c64,prefill1k,prefix1k", help=", ".join(WORKLOADS))
    servers.add_argument("--requests", type=int, help="in each workload, to try things out")
    servers.add_argument("--pause", type=float, default=2.0, help="seconds before each turn")
    servers.set_defaults(compare=compare_servers)
    for kind in (programs, servers):
        kind.add_argument("--rounds", type=int, default=3)
        kind.add_argument("--title", help="what the table is called")
        kind.add_argument("--json", type=Path, help="write the comparison to this file")
    args = parser.parse_args(argv)
    if unknown := set(getattr(args, "workloads", "c4").split(",")) - WORKLOADS.keys():
        parser.error(f"unknown workloads: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    return args


def main(argv: list[str]) -> int:
    """Take the turns, print the tables, keep the figures."""
    args = parse(argv)
    comparisons = args.compare(args)
    if args.json:
        args.json.write_text(json.dumps({"comparisons": comparisons}, indent=1))
    print("\n\n".join(comparison_text(comparison) for comparison in comparisons))
    print(json.dumps({"comparisons": comparisons}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
