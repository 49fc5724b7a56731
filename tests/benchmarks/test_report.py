"""From figures to tables: ratios that say which is better, and text put between markers."""

import json
from pathlib import Path

import pytest

from benchmarks import report

COMPARISON = {
    "title": "HTTP servers", "peer": "other", "machine": "a machine",
    "figures": {
        "c4_tok_s": {"ours": [20.0, 30.0, 80.0], "peer": [10.0, 10.0, 20.0]},
        "prefill1k_ttft_ms": {"ours": [10.0, 10.0, 10.0], "peer": [5.0, 20.0, 10.0]},
    },
    "cpu_ms": {"c4": {"ours": {"a": 0.25, "b": 1.0}, "peer": {}}},
}  # fmt: skip
KERNELS = {
    "threads": 2, "machine": "a machine", "read_gb_s": 20.0, "fma_gflop_s": 200.0,
    "products": [
        {"kind": kind, "rows": rows, "ms": 1.0, "gflop_s": 100.0, "gb_s": 15.0}
        for kind in ("F32", "BF16") for rows in (1, 4, 512)
    ],
}  # fmt: skip


def test_ratios_are_above_one_where_ours_is_better() -> None:
    assert report.ratios("c4_tok_s", [20, 5], [10, 10]) == [2, 0.5]
    assert report.ratios("prefill1k_ttft_ms", [20, 5], [10, 10]) == [0.5, 2]


def test_names_say_work_unit_and_direction() -> None:
    assert report.split("tiny_one_token_req_s") == ("tiny one token", "requests/s", True)
    assert report.split("prefix1k_ttft_ms") == ("prefix1k ttft", "ms", False)
    assert report.split("threads") is None


def test_a_comparison_shows_the_median_of_the_ratios_and_not_the_ratio_of_medians() -> None:
    text = report.comparison_text(COMPARISON)
    assert "| c4 (tok/s) | 30.0 | 10.0 | **3.00** | 2.00 .. 4.00 |" in text
    assert "| prefill1k ttft (ms) | 10.0 | 10.0 | **1.00** | 0.50 .. 2.00 |" in text
    assert "| c4 | 1.25: b 1.00, a 0.25 | 0.00:" in text


def test_kernels_stand_beside_the_limits() -> None:
    assert "| F32 | 15.0 | 75% | 100 | 50% |" in report.kernels_text(KERNELS)


def test_filling_again_replaces_what_was_filled_in_before() -> None:
    empty = f"above\n{report.BEGIN}\n{report.END}\nbelow\n"
    once = report.fill(empty, "one")
    assert report.fill(once, "two") == report.fill(empty, "two")
    assert once.startswith("above\n")
    assert once.endswith("\nbelow\n")


@pytest.mark.parametrize("text", ["", report.BEGIN, report.END])
def test_a_text_without_both_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        report.fill(text, "x")


def test_the_readme_has_the_markers() -> None:
    report.fill(Path(report.__file__).with_name("README.md").read_text(), "x")


def test_files_become_tables_and_a_small_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="of the bench extra")
    (tmp_path / "a.json").write_text(json.dumps({"comparisons": [COMPARISON]}))
    (tmp_path / "b.json").write_text(json.dumps(KERNELS))
    readme, plot = tmp_path / "README.md", tmp_path / "results.png"
    readme.write_text(f"{report.BEGIN}\n{report.END}")
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert report.main([*files, "--readme", str(readme), "--plot", str(plot)]) == 0
    assert all(part in readme.read_text() for part in ("HTTP servers", "Kernels", "(results.png)"))
    assert plot.stat().st_size < 100_000
