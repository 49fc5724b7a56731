"""Latent attention: its cache, what its configs and checkpoints may hold, and the same bits however it is computed."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayllm.config.kv_cache import KvCacheSettings
from rayllm.config.model_facts import read_model_facts
from rayllm.config.resolve import kv_bytes_per_token
from rayllm.errors import ModelError
from rayllm.model.compiled import CompiledDecoder
from rayllm.model.decoder import Decoder
from rayllm.model.families import spec_of
from rayllm.model.sharded_state import main as write_sharded_state
from rayllm_kernels.native.library import library
from tests.model.runner import Runner, Sequence, all_logits
from tests.models import VOCAB, make_tiny

Tiny, Load = Callable[[str], Path], Callable[..., Decoder]
needs_kernels = pytest.mark.skipif(library() is None, reason="no C++ compiler here")
VECTOR = 20 + 8
"""What the tiny models cache of a token in each of their three layers."""


def random_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def changed(source: Path, folder: Path, **values: Any) -> Path:
    """A copy of a model with other values in its config."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


@pytest.mark.parametrize(
    ("stored", "token"),
    [(None, 2 * VECTOR), ("float16", 2 * VECTOR), ("fp8_e4m3", VECTOR), ("int8_per_token_head", VECTOR + 4)],
)
def test_a_token_takes_one_vector(tiny: Tiny, load: Load, stored: str | None, token: int) -> None:
    """In the plain decoder, the compiled one, and by what is said of a config before a model is loaded."""
    settings = KvCacheSettings(dtype=stored)
    model = load(tiny("deepseek2"), torch.bfloat16, kv_cache=settings)
    assert [spec.bytes_per_token for spec in model.cache_specs()] == [token] * 3
    assert kv_bytes_per_token(read_model_facts(str(tiny("deepseek2"))), "bfloat16", settings) == 3 * token
    assert model.cache_bytes(16) == 16 * 3 * token
    assert [cache.nbytes for cache in model.new_caches(7, 16)] == [7 * 16 * token] * 3
    if library() is not None:
        compiled = CompiledDecoder(model, 1, 64)
        assert compiled.cache_bytes(16) == 16 * 3 * token
        sizes = [sum(part.nbytes for part in cache.parts()) for cache in compiled.new_caches(7, 16)]
        assert sizes == [7 * 16 * token] * 3


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["deepseek2", "deepseek2_lite"])
def test_same_bits_alone_and_in_any_batch(tiny: Tiny, load: Load, name: str, dtype: torch.dtype) -> None:
    """Contexts of several splits, decoding beside chunks of prompts, one thread or three."""
    rng = random.Random(1)
    prompts = [random_tokens(length, length) for length in (3, 40, 256, 257, 600)]

    def model(threads: int) -> CompiledDecoder:
        return CompiledDecoder(load(tiny(name), dtype, max_model_len=600), threads, 600)

    alone = [all_logits(model(1), prompt) for prompt in prompts]
    for threads in (1, 3):
        runner, sequences = Runner(model(threads), len(prompts), 600, 16), [Sequence(list(p)) for p in prompts]
        while left := [(i, s) for i, s in enumerate(sequences) if s.computed < len(s.tokens)]:
            runner.step([(i, s, min(len(s.tokens) - s.computed, rng.choice((1, 1, 5, 60)))) for i, s in left])
        for sequence, expected in zip(sequences, alone, strict=True):
            assert torch.equal(torch.stack(sequence.logits), expected)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_nearer_to_float32_than_plain_ones(tmp_path: Path, load: Load, dtype: torch.dtype) -> None:
    """Without experts, of which the least difference may choose others."""
    tokens, path = random_tokens(40), make_tiny("deepseek2", tmp_path, first_k_dense_replace=3)
    exact, plain = all_logits(load(path), tokens), all_logits(load(path, dtype), tokens)
    got = all_logits(CompiledDecoder(load(path, dtype), 2, 64), tokens)
    assert (got - exact).abs().mean() < (plain - exact).abs().mean() * 1.05


@needs_kernels
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head"])
def test_caches_of_eight_bits(tiny: Tiny, load: Load, kind: str) -> None:
    """Both decoders measure the same scales where a layer has one, and are near to the model's own type."""
    tokens, path = random_tokens(50), tiny("deepseek2")
    settings = KvCacheSettings(dtype=kind, measures_scales=True)
    exact, plain = all_logits(load(path), tokens), load(path, kv_cache=settings)
    compiled = CompiledDecoder(load(path, kv_cache=settings), 2, 64)
    for model in (plain, compiled):
        got = all_logits(model, tokens, 50)
        assert not torch.equal(got, exact)
        assert torch.nn.functional.cosine_similarity(got, exact, dim=-1).mean() > 0.97
    torch.testing.assert_close(torch.tensor(compiled.kv_scales()), torch.tensor(plain.kv_scales()), rtol=0.05, atol=0)


def test_layers_that_predict_further_ahead_are_left_out(tiny: Tiny, load: Load, tmp_path: Path) -> None:
    """They stand behind the last layer; without a word of them in the config a checkpoint does not fit it."""
    source = tiny("deepseek3")
    folder = changed(source, tmp_path / "ahead", num_nextn_predict_layers=1)
    tensors = load_file(source / "model.safetensors")
    ahead = {f"model.layers.3.{name}.weight": torch.ones(4) for name in ("enorm", "eh_proj", "self_attn.o_proj")}
    save_file({**tensors, **ahead}, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = random_tokens(9)
    assert torch.equal(all_logits(load(folder), tokens), all_logits(load(source), tokens))
    shutil.rmtree(folder)
    folder = changed(source, folder, num_nextn_predict_layers=0)
    save_file({**tensors, **ahead}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="no place for it"):
        load(folder)


def test_finished_shares(tiny: Tiny, start: Callable[..., Decoder], tmp_path: Path) -> None:
    """They hold matrices in the order that they have here."""
    assert write_sharded_state([str(tiny("deepseek2")), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    tokens, share = random_tokens(9), start(tmp_path / "out", "--load-format", "sharded_state")
    assert torch.equal(all_logits(share, tokens), all_logits(start(tiny("deepseek2")), tokens))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank: must be a positive integer"),
        ({"qk_rope_head_dim": "8"}, "qk_rope_head_dim: must be a positive integer"),
        ({"qk_rope_head_dim": 7}, "rotates 7 entries of a head, which must be even"),
        ({"q_lora_rank": -1}, "q_lora_rank: must be a positive integer"),
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace: must be a whole number"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported"),
        ({"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc' is not supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob: True is not supported"),
        ({"n_group": 5}, "n_group: 5 groups cannot divide 12 experts"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "rotates 4 of"),
        ({"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "factor": "4", "mscale_all_dim": 1.0}}, "factor"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_honoured(tiny: Tiny, tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(read_model_facts(str(changed(tiny("deepseek2"), tmp_path / "model", **values))))


def quantized(source: Path, folder: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """Write a model in 8 bits with scales of blocks, and return what its tensors then stand for."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    changed(source, folder, quantization_config=config)
    stored, wanted = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = wanted[name] = tensor
        if name.endswith("proj.weight") or "kv_a_proj" in name:
            rows, columns = (-(-have // size) for have, size in zip(tensor.shape, block, strict=True))
            scales = torch.rand(rows, columns) * 0.01 + 0.001
            whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            whole = whole[: tensor.shape[0], : tensor.shape[1]]
            stored[name] = (tensor / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"], wanted[name] = scales, stored[name].float() * whole
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return wanted


@pytest.mark.option("quantization")
@pytest.mark.parametrize("arguments", [(), ("-q", "fp8"), ("--safetensors-load-strategy", "eager")], ids=str)
def test_weights_with_scales_of_blocks(
    tiny: Tiny, start: Callable[..., Decoder], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """They count as what 8 bits and scale say, whatever part of a matrix is read."""
    wanted = quantized(tiny("deepseek3"), tmp_path / "fp8", (16, 32))
    plain = changed(tiny("deepseek3"), tmp_path / "plain")
    save_file(wanted, plain / "model.safetensors", metadata={"format": "pt"})
    tokens = random_tokens(20)
    assert torch.equal(all_logits(start(tmp_path / "fp8", *arguments), tokens), all_logits(start(plain), tokens))


@pytest.mark.option("quantization")
def test_blocks_that_lack_scales(tiny: Tiny, start: Callable[..., Decoder], tmp_path: Path) -> None:
    folder, name = tmp_path / "fp8", "model.layers.1.self_attn.o_proj.weight_scale_inv"
    quantized(tiny("deepseek3"), folder, (16, 32))
    tensors = load_file(folder / "model.safetensors")
    for scales, words in (({}, "missing"), ({name: tensors[name][:1]}, r"shape \[1, 2\], where blocks are \[3, 2\]")):
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file({**rest, **scales}, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=rf"{name}.*{words}"):
            start(folder)
