from pathlib import Path

import pytest

from rayllm_kernels.native import library
from rayllm_kernels.native.build import VARIANTS, WIDE, NoCompiler, build, compiler, cpu_features, runnable
from rayllm_kernels.native.check import check


def test_the_variants_that_a_cpu_can_run() -> None:
    def names(*features: str) -> list[str]:
        return [variant.name for variant in runnable(frozenset(features))]

    avx2 = ("avx2", "fma", "f16c")
    avx512 = (*avx2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
    assert names() == names("avx2") == ["portable"]
    assert names(*avx2, "sse2") == ["avx2", "portable"]
    assert names(*avx512) == ["avx512", "avx2", "portable"]
    assert names(*avx512, "avx512_bf16", "avx512_vnni") == ["avx512-bf16", "avx512", "avx2", "portable"]


def test_a_build_that_computes_wrong_numbers_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = VARIANTS[2], VARIANTS[3]
    monkeypatch.setattr(library, "runnable", lambda features: [fast, slow])
    monkeypatch.setattr(library, "build", lambda variant, folder, say: Path(variant.name))
    monkeypatch.setattr(library, "computes_right", lambda path, variant: variant is slow)
    monkeypatch.setattr(library, "load", lambda variant: variant)
    assert library.library.__wrapped__() is slow


def test_a_variant_that_the_compiler_does_not_know_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_slow_ones(variant: object, folder: Path, say: object) -> Path:
        if variant is VARIANTS[0]:
            raise NoCompiler("unrecognized option")
        return Path(variant.name)

    monkeypatch.setattr(library, "runnable", lambda features: [VARIANTS[0], VARIANTS[2]])
    monkeypatch.setattr(library, "build", compile_slow_ones)
    monkeypatch.setattr(library, "computes_right", lambda path, variant: True)
    monkeypatch.setattr(library, "load", lambda variant: variant)
    assert library.library.__wrapped__() is VARIANTS[2]


@pytest.mark.parametrize(("code", "right"), [("pass", True), ("raise ValueError", False), ("while True: pass", False)])
def test_a_build_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, right: bool) -> None:
    runs: list[list[str]] = []
    run = library.subprocess.run

    def try_it(command: list[str], **options: object) -> object:
        runs.append(command)
        return run([command[0], "-c", code], **options)

    monkeypatch.setattr(library.subprocess, "run", try_it)
    monkeypatch.setattr(library, "CHECK_S", 0.5 if "while" in code else 60.0)
    for path in (tmp_path / "build.so", tmp_path / "missing" / "build.so"):  # the second cannot be marked
        assert library.computes_right(path, VARIANTS[2]) is right
    library.computes_right(tmp_path / "build.so", VARIANTS[2])
    assert len(runs) == (2 if right else 3)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*runnable(cpu_features()), WIDE], ids=lambda variant: variant.name)
def test_builds_compute_right(variant: object) -> None:
    if not variant.needs <= cpu_features():
        pytest.skip("this CPU cannot run it")
    try:
        check(variant)
    except NoCompiler:
        pytest.skip("no C++ compiler here")


@pytest.mark.slow
@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[1], VARIANTS[-1]], ids=lambda variant: variant.name)
def test_every_variant_compiles_once(variant: object, tmp_path: Path) -> None:
    try:
        compiler()
    except NoCompiler:
        pytest.skip("no C++ compiler here")
    said: list[str] = []
    path = build(variant, tmp_path, said.append)
    assert path.is_file()
    assert said
    said.clear()
    assert build(variant, tmp_path, said.append) == path
    assert not said
