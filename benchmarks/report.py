"""Turn the JSON files of `benchmarks.turns` and `benchmarks.kernels` into markdown tables and one plot.

    python -m benchmarks.report results/*.json --readme benchmarks/README.md --plot benchmarks/results.png

Prints the tables, or with `--readme` puts them between that file's two markers. Each ratio is of one round, in which
both took a turn; above 1, ours is better.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: made by benchmarks.report -->", "<!-- end of figures -->"
UNITS = {"_tok_s": ("tok/s", True), "_req_s": ("requests/s", True), "_gb_s": ("GB/s", True), "_ms": ("ms", False)}
"""By the ending of a figure's name: its unit, and whether more is better."""
FEW, MANY = 1, 512
"""Rows of the products that bandwidth limits, and of those that arithmetic does."""


def machine_name() -> str:
    """The processor's name and how many of its cores this machine has."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{name}, {os.cpu_count()} cores"


def split(name: str) -> tuple[str, str, bool] | None:
    """The work that a figure's name stands for, its unit, whether more is better; None if it is no figure."""
    for ending, (unit, more) in UNITS.items():
        if name.endswith(ending):
            return name.removesuffix(ending).replace("_", " "), unit, more
    return None


def ratios(name: str, ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """Round by round, how many times better ours is."""
    named = split(name)
    assert named is not None, name
    return [a / b if named[2] else b / a for a, b in zip(ours, peer, strict=True)]


def work_and_unit(name: str) -> str:
    """A figure's name for people."""
    named = split(name)
    assert named is not None, name
    return f"{named[0]} ({named[1]})"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns but the first are numbers."""
    lines = [header, ["---", *(["---:"] * (len(header) - 1))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def comparison_text(comparison: Mapping[str, Any]) -> str:
    """One comparison: medians of both, median and range of the ratios; then CPU time where it was counted."""
    rows = []
    for name, both in comparison["figures"].items():
        each = ratios(name, both["ours"], both["peer"])
        medians = [f"{statistics.median(both[side]):,.1f}" for side in ("ours", "peer")]
        spread = f"{min(each):.2f} .. {max(each):.2f}"
        rows.append([work_and_unit(name), *medians, f"**{statistics.median(each):.2f}**", spread])
    rounds = max((len(both["ours"]) for both in comparison["figures"].values()), default=0)
    title = f"**{comparison['title']}, rayllm and {comparison['peer']}**: median of {rounds} on {comparison['machine']}"
    parts = [title, markdown_table(["work", "rayllm", comparison["peer"], "ratio", "range"], rows)]
    if cpu := comparison.get("cpu_ms"):
        rows = [[work, _processes(both["ours"]), _processes(both["peer"])] for work, both in cpu.items()]
        parts += ["CPU milliseconds for each output token, by process name:"]
        parts += [markdown_table(["work", "rayllm", comparison["peer"]], rows)]
    return "\n\n".join(parts)


def _processes(cpu_ms: Mapping[str, float]) -> str:
    shown = sorted(cpu_ms.items(), key=lambda item: -item[1])
    return f"{sum(cpu_ms.values()):.2f}: " + ", ".join(f"{name} {ms:.2f}" for name, ms in shown)


def products(kernels: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Storage of weights, GB/s with one row, GFLOP/s with the most rows."""
    found = {(each["kind"], each["rows"]): each for each in kernels["products"]}
    kinds = dict.fromkeys(kind for kind, _ in found)
    return [(kind, found[kind, FEW]["gb_s"], found[kind, MANY]["gflop_s"]) for kind in kinds]


def kernels_text(kernels: Mapping[str, Any]) -> str:
    """The kernels beside the machine's limits."""
    read, fma = kernels["read_gb_s"], kernels["fma_gflop_s"]
    rows = [
        [kind, f"{gb:.1f}", f"{gb / read:.0%}", f"{flops:.0f}", f"{flops / fma:.0%}"]
        for kind, gb, flops in products(kernels)
    ]
    title = (
        f"**Kernels**, {kernels['threads']} threads on {kernels['machine']}: memory is read at {read:.1f} GB/s, and "
        f"float32 multiply-adds run at {fma:.0f} GFLOP/s. (Small storages are partly read from the last-level cache.)"
    )
    header = ["storage", "GB/s, 1 row", "of reads", f"GFLOP/s, {MANY} rows", "of multiply-adds"]
    return f"{title}\n\n{markdown_table(header, rows)}"


def fill(text: str, figures: str) -> str:
    """A text with what stands between its markers replaced.

    Raises:
        ValueError: the markers are not there.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


def draw(comparisons: Sequence[Mapping[str, Any]], kernels: Mapping[str, Any] | None, file: Path) -> None:
    """Ratios with their ranges; bandwidth and arithmetic reached beside the limits (needs matplotlib)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 6), width_ratios=(2, 1, 1), layout="constrained")
    bars = [
        (f"{one['title']}: {work_and_unit(name)} / {one['peer']}", ratios(name, both["ours"], both["peer"]))
        for one in reversed(comparisons)
        for name, both in reversed(one["figures"].items())
    ]
    middles = [statistics.median(each) for _, each in bars]
    below = [middle - min(each) for middle, (_, each) in zip(middles, bars, strict=True)]
    above = [max(each) - middle for middle, (_, each) in zip(middles, bars, strict=True)]
    axes[0].barh(range(len(bars)), middles, xerr=[below, above], color="tab:blue", ecolor="black")
    axes[0].set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes[0].axvline(1, color="black", linewidth=1)
    axes[0].set(title="times as fast as the peer (median, range)", xlim=(0, None))
    if kernels is not None:
        storages, bandwidth, arithmetic = zip(*products(kernels), strict=True)
        panels = ("GB/s, 1 row", bandwidth, "read_gb_s"), (f"GFLOP/s, {MANY} rows", arithmetic, "fma_gflop_s")
        for axis, (title, values, limit) in zip(axes[1:], panels, strict=True):
            axis.bar(storages, values, color="tab:green")
            axis.axhline(kernels[limit], color="tab:red", label=f"limit: {kernels[limit]:.0f}")
            axis.set(title=title)
            axis.tick_params(axis="x", labelrotation=60)
            axis.legend(loc="lower right")
    figure.savefig(file, dpi=72)
    pyplot.close(figure)


def main(argv: list[str]) -> int:
    """Read the files, write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="what benchmarks.turns and benchmarks.kernels wrote")
    parser.add_argument("--readme", type=Path, help="put the tables between this file's markers")
    parser.add_argument("--plot", type=Path, help="draw to this file")
    args = parser.parse_args(argv)
    contents = [json.loads(file.read_text()) for file in args.files]
    comparisons = [comparison for content in contents for comparison in content.get("comparisons", ())]
    kernels = next((content for content in contents if "products" in content), None)
    parts = [comparison_text(comparison) for comparison in comparisons]
    if kernels is not None:
        parts.append(kernels_text(kernels))
    if args.plot:
        draw(comparisons, kernels, args.plot)
        if args.readme:
            parts.append(f"![Ratios and limits]({args.plot.name})")
    if args.readme:
        args.readme.write_text(fill(args.readme.read_text(), "\n\n".join(parts)))
    else:
        print("\n\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
