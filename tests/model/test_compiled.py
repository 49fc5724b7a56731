"""The compiled decoder: close to the plain one for every family, and the same bits however a request is computed."""

import random
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from rayllm.config.kv_cache import KvCacheSettings
from rayllm.errors import ConfigError
from rayllm.model.compiled import KEPT_KINDS, CompiledDecoder
from rayllm.model.decoder import Decoder
from rayllm.model.layers import ColumnLinear, Quantized, RowLinear
from rayllm_kernels.native.library import library
from tests.model.gguf_writer import write_gguf
from tests.model.runner import Runner, Sequence, all_logits
from tests.models import TINY, VOCAB, make_tiny

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")
Tiny, Load = Callable[[str], Path], Callable[..., Decoder]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def compiled(
    load: Load, folder: Path, dtype: torch.dtype = torch.float32, threads: int = 2, max_model_len: int | None = None
) -> CompiledDecoder:
    return CompiledDecoder(load(folder, dtype, max_model_len=max_model_len), threads, 512)


@pytest.mark.parametrize("name", TINY)
def test_close_to_the_plain_decoder(tiny: Tiny, load: Load, name: str) -> None:
    tokens = random_tokens(50)
    wanted, got = all_logits(load(tiny(name)), tokens), all_logits(compiled(load, tiny(name)), tokens)
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()
    for chunk in (1, 7):
        assert torch.equal(all_logits(compiled(load, tiny(name)), tokens, chunk), got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_narrow_weights_are_nearer_to_float32_than_plain_ones(
    tiny: Tiny, load: Load, name: str, dtype: torch.dtype
) -> None:
    tokens = random_tokens(40)
    exact = all_logits(load(tiny(name)), tokens)
    plain, got = all_logits(load(tiny(name), dtype), tokens), all_logits(compiled(load, tiny(name), dtype), tokens)
    assert (got - exact).abs().mean() < (plain - exact).abs().mean() * 1.05
    assert torch.equal(all_logits(compiled(load, tiny(name), dtype), tokens, 3), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_same_bits_alone_and_in_any_batch(tiny: Tiny, load: Load, dtype: torch.dtype, block_size: int) -> None:
    """Long contexts (several splits), mixed steps, one thread or three."""
    rng = random.Random(1)
    prompts = [random_tokens(rng.choice((3, 40, 250, 256, 257, 600)), seed) for seed in range(9)]
    alone = [
        all_logits(compiled(load, tiny("mistral_window" if i % 2 else "llama"), dtype, max_model_len=600), p, 512)
        for i, p in enumerate(prompts)
    ]
    for threads in (1, 3):
        for parity, name in enumerate(("llama", "mistral_window")):
            mine = [i for i in range(9) if i % 2 == parity]
            runner = Runner(compiled(load, tiny(name), dtype, threads, 600), len(mine), 600, block_size)
            sequences = [Sequence(list(prompts[i])) for i in mine]
            while any(s.computed < len(s.tokens) for s in sequences):
                work = []
                for row, sequence in enumerate(sequences):
                    left = len(sequence.tokens) - sequence.computed
                    if left and rng.random() < 0.8:
                        work.append((row, sequence, min(left, rng.choice((1, 1, 5, 60)))))
                if work:
                    runner.step(work)
            for i, sequence in zip(mine, sequences, strict=True):
                assert torch.equal(torch.stack(sequence.logits), alone[i]), (i, threads)


@pytest.mark.parametrize("name", ["llama_odd_heads", "olmo2", "gemma3", "qwen3", "phi3"])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_measured_scales_are_those_of_the_plain_decoder(tiny: Tiny, load: Load, name: str, kind: str) -> None:
    """Whatever comes before keys and values are stored, which is done twice in the first step."""
    tokens = random_tokens(50)
    settings = KvCacheSettings(dtype=kind, kept_layers=frozenset({1}), measures_scales=True)
    plain = load(tiny(name), kv_cache=settings)
    model = CompiledDecoder(load(tiny(name), kv_cache=settings), 2, 512)
    wanted, got = all_logits(plain, tokens, 50), all_logits(model, tokens, 50)
    assert torch.nn.functional.cosine_similarity(got, wanted, dim=-1).min() > 0.98
    torch.testing.assert_close(torch.tensor(model.kv_scales()), torch.tensor(plain.kv_scales()), rtol=0.05, atol=0)
    assert model.kv_scales()[0] == pytest.approx(plain.kv_scales()[0], rel=1e-5)
    assert model.kv_scales()[1] == (1.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss", "glm4_moe"])
def test_experts_give_the_same_bits_in_company(tiny: Tiny, load: Load, name: str, dtype: torch.dtype) -> None:
    prompts = [random_tokens(count, seed) for seed, count in enumerate((1, 30, 64, 5, 47))]
    model = compiled(load, tiny(name), dtype)
    alone = [all_logits(model, prompt) for prompt in prompts]
    sequences, model = [Sequence(list(prompt)) for prompt in prompts], compiled(load, tiny(name), dtype, threads=1)
    runner, chunks = Runner(model, len(prompts), 64), (1, 7, 64, 2, 20)
    while any(s.computed < len(s.tokens) for s in sequences):
        left = [min(chunk, len(s.tokens) - s.computed) for s, chunk in zip(sequences, chunks, strict=True)]
        runner.step([(row, sequences[row], count) for row, count in enumerate(left) if count])
    for sequence, wanted in zip(sequences, alone, strict=True):
        assert torch.equal(torch.stack(sequence.logits), wanted)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_experts_in_integers_are_near(tiny: Tiny, load: Load, name: str) -> None:
    """Few tokens are near enough to two experts for rounding to choose between these."""
    tokens = random_tokens(60)
    exact, got = all_logits(load(tiny(name)), tokens), all_logits(compiled(load, tiny(name), torch.bfloat16), tokens)
    assert torch.nn.functional.cosine_similarity(got, exact, dim=-1).median() > 0.999


def test_routed_experts_are_told(tiny: Tiny, load: Load) -> None:
    """Of the layers that have some, for each token of the last step."""
    models = load(tiny("qwen3_moe")), compiled(load, tiny("qwen3_moe"))
    for model in models:
        all_logits(model, random_tokens(20), 15)
    plain, told = (model.routed for model in models)
    assert list(plain) == list(told) == [0, 2]
    assert {ids.shape for ids in told.values()} == {(5, 4)}
    assert all(torch.equal(told[layer], ids) for layer, ids in plain.items())


def test_block_size_that_does_not_fit_is_refused(tiny: Tiny, load: Load) -> None:
    with pytest.raises(ConfigError, match="block-size"):
        compiled(load, tiny("llama")).new_caches(4, 24)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantized_weights_are_used_as_they_are(tiny: Tiny, load: Load, tmp_path: Path, kind: str) -> None:
    """Close to the same file dequantized; the decoder's own matrices are never filled."""
    folder = make_tiny("llama", tmp_path / "model", hidden_size=96, intermediate_size=64, head_dim=32)
    file = write_gguf(folder, tmp_path / "model.gguf", "llama", kind)
    tokens = random_tokens(40)
    wanted = all_logits(load(file), tokens)
    got = all_logits(CompiledDecoder(load(file, keeps=KEPT_KINDS), 2, 64), tokens)
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_products_in_integers_are_near_and_the_same_bits(tiny: Tiny, load: Load, tmp_path: Path, kind: str) -> None:
    """With a dtype of 16 bits; however the request is cut."""
    folder = make_tiny("llama", tmp_path / "model", hidden_size=96, intermediate_size=64, head_dim=32)
    file = write_gguf(folder, tmp_path / "model.gguf", "llama", kind)
    tokens = random_tokens(40)
    exact = all_logits(load(file), tokens)
    got, cut = (
        all_logits(CompiledDecoder(load(file, torch.bfloat16, keeps=KEPT_KINDS), threads, 64), tokens, chunk)
        for threads, chunk in ((2, 40), (1, 3))
    )
    assert torch.equal(got, cut)
    assert torch.nn.functional.cosine_similarity(got, exact, dim=-1).min() > 0.995


def test_parts_of_several_kinds(load: Load, tmp_path: Path) -> None:
    """Queries and keys in one format, values in another, gate and up different: as files of mixed formats have it."""
    folder = make_tiny("llama_biases", tmp_path / "model", hidden_size=96, intermediate_size=64, head_dim=32)
    plain = load(folder)
    tokens = random_tokens(40)
    model = load(folder)
    with torch.no_grad():
        for layer, other in zip(model.layers, plain.layers, strict=True):
            mix(layer.attention.qkv, other.attention.qkv, {"q": "Q8_0", "k": "Q8_0", "v": "Q4_1"})
            mix(layer.mlp.gate_up, other.mlp.gate_up, {"gate": "Q8_0"})
            mix(layer.attention.out, other.attention.out, {"": "Q4_0"})
    wanted = all_logits(plain, tokens)
    got = all_logits(CompiledDecoder(model, 2, 64), tokens)
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()


def mix(layer: ColumnLinear | RowLinear, other: ColumnLinear | RowLinear, kinds: dict[str, str]) -> None:
    """Quantize parts of a layer, and give the other one the values that they stand for."""
    offset = 0
    sizes = zip(layer.parts, layer.sizes, strict=True) if isinstance(layer, ColumnLinear) else [("", layer.out_size)]
    for name, size in sizes:
        if name in kinds:
            kind = gguf.GGMLQuantizationType[kinds[name]]
            rows = gguf.quants.quantize(other.weight[offset : offset + size].numpy(), kind)
            layer.quantized[name] = Quantized(kinds[name], torch.from_numpy(rows))
            other.weight[offset : offset + size] = torch.from_numpy(gguf.quants.dequantize(rows, kind))
        offset += size
