"""GGUF files: block formats, conventions of each architecture, and damage."""

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from rayllm.config.gguf_file import BLOCKS, read_gguf
from rayllm.config.model_facts import read_model_facts
from rayllm.errors import ModelError
from rayllm.model.decoder import Decoder
from rayllm.model.dequantize import dequantize
from rayllm.model.loader import load_model
from tests.model.gguf_writer import write_gguf
from tests.model.runner import all_logits
from tests.model.test_families import tokens_of
from tests.models import load_gguf_with_transformers, make_tiny

Load = Callable[..., Decoder]


@pytest.mark.parametrize("kind", BLOCKS)
def test_dequantizes_any_bytes(kind: str) -> None:
    """Bit for bit what the gguf package makes of random blocks whose scales are finite."""
    _, values, size = BLOCKS[kind]
    per_row = 3 if values > 1 else 96
    data = np.random.default_rng(0).integers(0, 256, (5, per_row, size), dtype=np.uint8)
    for low_byte in {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2], "Q5_1": [0, 2]}.get(kind, [0]):
        data[..., low_byte + 1] &= 0x3F  # float16 below 2
    data = data.reshape(5, -1)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    actual = dequantize(torch.from_numpy(data), kind).numpy()
    assert actual.shape == (5, per_row * values)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_values_are_near(kind: str) -> None:
    """What was quantized comes back within a step, in its place."""
    values = np.random.default_rng(1).standard_normal((4, 256), dtype=np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    data = np.ascontiguousarray(data).view(np.uint8)
    step = {"F16": 0.002, "BF16": 0.02, "Q8_0": 0.03}.get(kind, 0.5)
    assert np.abs(dequantize(torch.from_numpy(data), kind).numpy() - values).max() < step


GEMMA3_LINEAR = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base": 1e6}
ARCHITECTURES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "llama", {}, {}),
    ("llama_tied", "llama", {}, {}),
    ("llama_odd_heads", "llama", {}, {}),
    ("llama_linear", "llama", {}, {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
    (
        "llama_yarn",
        "llama",
        {},
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64},
    ),
    ("mistral", "llama", {}, {}),
    ("qwen2", "qwen2", {}, {}),
    ("qwen3", "qwen3", {}, {}),
    ("phi3", "phi3", {}, {}),
    ("gemma2", "gemma2", {"query_pre_attn_scalar": 16}, {}),
    ("gemma3", "gemma3", {"query_pre_attn_scalar": 16}, GEMMA3_LINEAR),
    ("granite", "granite", {}, {}),
    ("olmo2", "olmo2", {}, {}),
]


@pytest.mark.parametrize(
    ("name", "architecture", "changes", "metadata"), ARCHITECTURES, ids=[case[0] for case in ARCHITECTURES]
)
def test_file_equals_folder(
    name: str, architecture: str, changes: dict[str, Any], metadata: dict[str, Any], tmp_path: Path, load: Load
) -> None:
    folder = make_tiny(name, tmp_path / "model", **changes)
    file = write_gguf(folder, tmp_path / "model.gguf", architecture, **metadata)
    prompt = tokens_of(1, 30)
    torch.testing.assert_close(all_logits(load(file), prompt), all_logits(load(folder), prompt), atol=1e-4, rtol=1e-4)


# What transformers does not read from the file has to be its default.
_GEMMA2 = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


@pytest.mark.parametrize(
    ("name", "changes"), [("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 128}), ("gemma2", _GEMMA2)]
)
def test_transformers_reads_the_file_alike(name: str, changes: dict[str, Any], tmp_path: Path, load: Load) -> None:
    """The conventions of the writer above are not its own invention."""
    folder = make_tiny(name, tmp_path / "model", **changes)
    file = write_gguf(folder, tmp_path / "model.gguf", name, rope__freq_base=1e4)
    hf, prompt = load_gguf_with_transformers(file, torch.float32).eval(), tokens_of(1, 30)
    with torch.no_grad():
        expected = hf(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(all_logits(load(file), prompt), expected, atol=1e-3, rtol=1e-4)


def test_frequency_factors(tmp_path: Path, load: Load) -> None:
    """Llama 3.1's rope lies in a tensor of divisors there."""
    folder = make_tiny("llama_llama3", tmp_path / "model")
    expected = all_logits(load(folder), tokens_of(1, 40))
    plain = 1 / 10000 ** (np.arange(0, 8, 2, dtype=np.float32) / 8)
    divisors = plain / load(folder).ropes[0].inverse_R.numpy()
    file = write_gguf(folder, tmp_path / "model.gguf", "llama", extra={"rope_freqs.weight": divisors})
    torch.testing.assert_close(all_logits(load(file), tokens_of(1, 40)), expected, atol=1e-4, rtol=1e-4)


def test_longrope_factors(tmp_path: Path, load: Load) -> None:
    folder = make_tiny("phi3_longrope", tmp_path / "model")
    extra = {
        "rope_factors_short.weight": np.array([1.0, 1.5], dtype=np.float32),
        "rope_factors_long.weight": np.array([2.0, 3.5], dtype=np.float32),
    }
    metadata = {"rope__scaling__original_context_length": 32, "rope__dimension_count": 4}
    file = write_gguf(folder, tmp_path / "model.gguf", "phi3", extra=extra, **metadata)
    for length in (32, 60):
        pair = [all_logits(load(path, max_model_len=length), tokens_of(1, 32)) for path in (file, folder)]
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_quantized_file(kind: str, tmp_path: Path, load: Load) -> None:
    """Loads in float32 to what the gguf package dequantizes, and in bfloat16 to that, rounded."""
    folder = make_tiny("llama", tmp_path / "model", hidden_size=96, intermediate_size=64, head_dim=32)
    file = write_gguf(folder, tmp_path / "model.gguf", "llama", kind)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(str(file)).tensors}
    down = reader["blk.1.ffn_down.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(down.data, down.tensor_type).astype(np.float32))
    assert torch.equal(load(file).layers[1].mlp.down.weight, expected)
    assert torch.equal(load(file, torch.bfloat16).layers[1].mlp.down.weight, expected.bfloat16())


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("good")
    return write_gguf(make_tiny("llama", place / "model"), place / "model.gguf", "llama").read_bytes()


def eos_beyond(data: bytes) -> bytes:
    at = data.find(b"tokenizer.ggml.eos_token_id") + len(b"tokenizer.ggml.eos_token_id")
    return data[: at + 4] + b"\xff" * 4 + data[at + 8 :]


def replaced(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def after(data: bytes, key: bytes) -> int:
    return data.find(key) + len(key)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda d: d[: len(d) // 2], "truncated"),
    "cut by a byte": (lambda d: d[:-40], "truncated"),
    "cut in the metadata": (lambda d: d[:300], "truncated"),
    "empty": (lambda d: b"", "cannot be read"),
    "magic": (lambda d: b"FUGG" + d[4:], "magic"),
    "version": (lambda d: replaced(d, 4, struct.pack("<I", 9)), "version 9"),
    "byte order": (lambda d: replaced(d, 4, struct.pack(">I", 3)), "version"),
    "no tensors": (lambda d: replaced(d, 8, bytes(8)), "no tensors"),
    "too many tensors": (lambda d: replaced(d, 8, struct.pack("<Q", 1 << 60)), "number of tensors"),
    "too many values": (lambda d: replaced(d, 16, struct.pack("<Q", 1 << 60)), "metadata values"),
    "string length": (lambda d: replaced(d, 24, struct.pack("<Q", 1 << 40)), "length"),
    "list length": (lambda d: replaced(d, after(d, b"ggml.tokens") + 8, struct.pack("<Q", 1 << 40)), "length"),
    "value type": (lambda d: replaced(d, after(d, b"general.architecture"), struct.pack("<I", 99)), "type 99"),
    "architecture": (lambda d: d.replace(b"llama", b"hyena"), "hyena"),
    "end token": (eos_beyond, "eos_token_id"),
    "tensor type": (lambda d: replaced(d, after(d, b"blk.1.ffn_up.weight") + 4 + 16, struct.pack("<I", 77)), "type 77"),
    "dimensions": (lambda d: replaced(d, after(d, b"blk.1.ffn_up.weight"), struct.pack("<I", 1000)), "dimensions"),
    "offset": (
        lambda d: replaced(d, after(d, b"blk.1.ffn_up.weight") + 4 + 16 + 4, struct.pack("<Q", 1 << 50)),
        "beyond the end",
    ),
    "text for a number": (
        lambda d: replaced(d, after(d, b"llama.block_count"), struct.pack("<IQ", 8, 1) + b"x"),
        "damaged|must be",
    ),
    "no heads": (lambda d: replaced(d, after(d, b"attention.head_count") + 4, bytes(4)), "head_count"),
    "missing tensor": (lambda d: d.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_ux.weight"), "blk.1.ffn_u"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged(damage: str, good: bytes, tmp_path: Path) -> None:
    change, word = DAMAGES[damage]
    file = tmp_path / "bad.gguf"
    file.write_bytes(change(good))
    with pytest.raises(ModelError, match=word) as caught:
        load_model(read_model_facts(str(file)), torch.float32, torch.device("cpu"))
    assert caught.value.file == str(file)


def test_random_damage_is_told(good: bytes, tmp_path: Path) -> None:
    """Random bytes anywhere in the header end in a `ModelError` or in nothing; never in another error or a hang."""
    rng = np.random.default_rng(0)
    file = tmp_path / "bad.gguf"
    header = good.find(b"blk.2.") + 200
    for _ in range(300):
        data = bytearray(good)
        for place in rng.integers(4, header, 3):
            data[place] = rng.integers(0, 256)
        file.write_bytes(data)
        with contextlib.suppress(ModelError):
            read_model_facts(str(file))


def test_metadata(good: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(good)
    metadata = read_gguf(str(file)).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]
