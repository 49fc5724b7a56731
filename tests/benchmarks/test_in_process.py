"""The in-process loads, on an engine that only notes what it is asked."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import in_process


class Noting:
    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.asked: list[tuple[int, int, int]] = []

    def run(self, prompts: Sequence[list[int]], output_tokens: int) -> None:
        self.asked.append((len(prompts), len(prompts[0]), output_tokens))


@pytest.mark.parametrize(
    ("streams", "most", "concurrent"), [(1, 64, []), (256, 16, ["c4", "c16"]), (256, 64, ["c4", "c16", "c64"])]
)
def test_an_engine_gets_the_loads_that_it_can_run(
    streams: int, most: int, concurrent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(in_process.time, "perf_counter", lambda: next(ticks) ** 2)
    engine = Noting(streams)
    figures = in_process.measure(engine, repeats=2, most=most)
    assert list(figures) == [f"{name}_tok_s" for name in ("prefill1k", "decode1", *concurrent)]
    assert engine.asked[1:3] == [(1, 1024, 1)] * 2
    assert engine.asked[7:] == [load for load in in_process.CONCURRENT if f"c{load[0]}" in concurrent]


def test_weights_are_those_of_the_format(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 3), ("b.safetensors", 4), ("tokenizer.json", 50), ("x.gguf", 9)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert in_process.weight_bytes(tmp_path) == 7
    assert in_process.weight_bytes(tmp_path / "x.gguf") == 9
