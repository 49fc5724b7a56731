"""The choice of implementations."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from rayllm_kernels import REFERENCE, Needs, Ops, select, table
from rayllm_kernels.table import ALL, CACHE, PLATFORMS, Implementation, choose, explain, implementations


def fast(name: str = "fast", **changes: object) -> Implementation:
    values = {"operations": ("rotary",), "platforms": ("cpu",), "priority": 50, "load": lambda: REFERENCE}
    return Implementation(name=name, **{**values, **changes})


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_platform_has_every_operation(platform: str) -> None:
    assert [choice.operation for choice in choose(platform)] == list(ALL)
    chosen = select(platform)
    assert all(callable(getattr(chosen, name)) for name in ALL)


def test_unknown_platform() -> None:
    with pytest.raises(ValueError, match="platform 'tpu'"):
        select("tpu")


def test_the_highest_priority_that_can_is_taken() -> None:
    unable = fast("unable", priority=60, why_not=lambda needs: "no such chip")
    among = (*implementations(), fast(), unable)
    rotary = next(choice for choice in choose("cpu", among=among) if choice.operation == "rotary")
    assert rotary.taken.name == "fast"
    assert rotary.refused == (("unable", "no such chip"),)
    assert next(c for c in choose("cuda", among=among) if c.operation == "rotary").taken.name != "fast"


def test_what_a_model_needs_decides() -> None:
    def no_sinks(needs: Needs) -> str | None:
        return "no sinks" if needs.sinks else None

    def attention(needs: Needs) -> str:
        among = (*implementations(), fast(operations=CACHE, why_not=no_sinks))
        names = {choice.taken.name for choice in choose("cpu", needs, among) if choice.operation in CACHE}
        assert len(names) == 1, "a cache's operations come together"
        return names.pop()

    assert attention(Needs(dtype=torch.float16)) == "fast"
    assert attention(Needs(sinks=True)) == "torch"


def test_named_implementations_are_tried_first() -> None:
    """In their order, before those of higher priority; those that cannot run here are passed over."""
    unable = fast("unable", operations=("rms_norm",), why_not=lambda needs: "no such chip")
    other = fast("other", operations=("rms_norm", "rotary"), priority=90)
    among = (*implementations(), unable, other)
    order = {"rms_norm": ("unable", "triton", "torch")}
    norm, rotary = (
        next(choice for choice in choose("cpu", among=among, first=order) if choice.operation == name)
        for name in ("rms_norm", "rotary")
    )
    assert (norm.taken.name, norm.refused) == ("torch", (("unable", "no such chip"),))
    assert rotary.taken.name == "other"
    assert next(c for c in choose("cpu", among=among) if c.operation == "rms_norm").taken.name == "other"
    named = fast("native", operations=("rms_norm",), platforms=("native",))
    chosen = choose("cpu", among=(*implementations()[:1], named), first={"rms_norm": ("native",)})
    assert {c.operation for c in chosen if c.taken.name == "native"} == {"rms_norm"}


def test_nothing_is_loaded_that_was_not_chosen() -> None:
    def load() -> None:
        raise AssertionError

    refused = fast(load=load, why_not=lambda needs: "too slow")
    assert select("cpu", among=(*implementations(), refused)).rotary is REFERENCE.rotary


def test_the_explanation_is_one_line() -> None:
    among = (*implementations(), fast(), fast("other", priority=60, why_not=lambda needs: "not installed"))
    line = explain(choose("cpu", among=among))
    assert "fast: rotary; " in line
    assert line.endswith("not other: not installed")
    assert "\n" not in line


def test_parts_of_a_cache_cannot_be_registered_alone() -> None:
    with pytest.raises(AssertionError):
        fast(operations=("write_kv",))


def test_triton_waits_for_a_gpu_that_has_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken() -> dict[str, str]:
        return {choice.operation: choice.taken.name for choice in choose("cuda", Needs(head_size=128))}

    monkeypatch.setattr(table, "find_spec", lambda name: object())
    assert set(taken().values()) == {"torch"}
    monkeypatch.setattr(table, "TRITON_TRIED", True)
    assert all(taken()[name] == "triton" for name in CACHE)
    assert taken()["linear"] == "torch"
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    assert set(taken().values()) == {"torch"}


def test_flash_attention_is_for_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(needs: Needs) -> str:
        return next(choice.taken.name for choice in choose("cuda", needs) if choice.operation == "paged_attention")

    half = Needs(dtype=torch.bfloat16, head_size=128, block_size=16)
    assert attention(half) == "torch"
    monkeypatch.setattr(table, "find_spec", lambda name: object())
    assert attention(half) == "torch"
    monkeypatch.setattr(table, "FLASH_TRIED", True)
    assert attention(half) == "flash"
    own = {"cache_of_its_own": True}
    for other in (
        own,
        {"dtype": torch.float32},
        {"head_size": 320},
        {"head_size": 60},
        {"block_size": 8},
        {"sinks": True},
    ):
        assert attention(replace(half, **other)) == "torch"
    monkeypatch.setattr(table, "TRITON_TRIED", True)
    assert attention(half) == "triton"
    assert attention(replace(half, **own)) == "torch"


def test_a_table_can_be_changed() -> None:
    changed = replace(REFERENCE, rotary=REFERENCE.rms_norm)
    assert isinstance(changed, Ops)
    assert changed.rotary is REFERENCE.rms_norm


@pytest.mark.slow
def test_importing_loads_no_gpu_library() -> None:
    code = "import sys, rayllm.llm, rayllm_kernels.table as t; t.select('cpu'); assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
