from pathlib import Path

import pytest

from rayllm_kernels.native.build import AVX512, VARIANTS, NoCompiler, build, choose, compiler


def test_the_fastest_variant_that_a_cpu_can_run() -> None:
    assert choose(frozenset({"avx2", "fma", "f16c", "sse2"})).name == "avx2"
    assert choose(frozenset({"avx2"})).name == "portable"
    assert choose(frozenset()).name == "portable"


@pytest.mark.slow
@pytest.mark.parametrize("variant", [AVX512, VARIANTS[-1]], ids=lambda variant: variant.name)
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
