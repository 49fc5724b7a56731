"""Folders of safetensors: which files are read, which shares, and what is said of damaged ones."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayllm.config.model_facts import read_model_facts
from rayllm.config.weights import WeightsConfig
from rayllm.errors import ModelError
from rayllm.model.decoder import Decoder
from rayllm.model.loader import load_model
from tests.models import make_tiny

Load = Callable[..., Decoder]
INDEX = "model.safetensors.index.json"
VICTIM = "model.layers.1.mlp.up_proj.weight"


def same(one: Decoder, other: Decoder) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A llama in one file."""
    return make_tiny("llama", tmp_path / "one")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in several files with an index."""
    folder = make_tiny("llama", tmp_path / "many", shard_bytes="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def edit(file: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def test_shards_equal_one_file(folder: Path, sharded: Path, load: Load) -> None:
    assert same(load(folder), load(sharded))


def test_files_that_no_index_names_are_ignored(sharded: Path, load: Load) -> None:
    before = load(sharded)
    save_file({VICTIM: torch.zeros(80, 48)}, sharded / "consolidated.safetensors")
    save_file({VICTIM: torch.zeros(80, 48)}, sharded / "adapter.safetensors")
    assert same(load(sharded), before)


def test_parts_without_an_index(sharded: Path, load: Load) -> None:
    before = load(sharded)
    (sharded / INDEX).unlink()
    save_file({VICTIM: torch.zeros(80, 48)}, sharded / "consolidated.00.safetensors")
    assert same(load(sharded), before)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_are_converted(folder: Path, load: Load, stored: torch.dtype) -> None:
    before = load(folder)
    edit(folder / "model.safetensors", lambda t: t.update({k: v.to(stored) for k, v in t.items()}))
    for old, new in zip(before.parameters(), load(folder).parameters(), strict=True):
        assert torch.equal(old.to(stored).float(), new)


def test_head_of_a_tied_model_is_ignored(tiny: Callable[[str], Path], tmp_path: Path, load: Load) -> None:
    folder = make_tiny("llama_tied", tmp_path)
    edit(folder / "model.safetensors", lambda t: t.update({"lm_head.weight": torch.zeros(99, 48)}))
    assert same(load(folder), load(tiny("llama_tied")))
    model = load(folder)
    assert model.head is model.embed


def test_old_buffers_are_ignored(folder: Path, load: Load) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder / "model.safetensors", lambda t: t.update({name: torch.zeros(4)}))
    load(folder)


def test_dummy_needs_no_weights(folder: Path, load: Load) -> None:
    (folder / "model.safetensors").unlink()
    dummy = WeightsConfig(format="dummy")
    one, other = load(folder, weights=dummy), load(folder, weights=dummy)
    assert same(one, other)
    assert one.layers[0].attention.qkv.weight.std() > 0
    assert not any(p.requires_grad for p in one.parameters())
    assert not one.training


def fails(folder: Path, file: str, tensor: str | None, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(read_model_facts(str(folder)), torch.float32, torch.device("cpu"))
    error = caught.value
    assert Path(error.file).name == file
    assert error.tensor == tensor
    for word in words:
        assert word in str(error)


def test_missing_tensor(folder: Path) -> None:
    edit(folder / "model.safetensors", lambda t: t.pop(VICTIM))
    fails(folder, "model.safetensors", VICTIM, "missing")


def test_missing_head(folder: Path) -> None:
    edit(folder / "model.safetensors", lambda t: t.pop("lm_head.weight"))
    fails(folder, "model.safetensors", "lm_head.weight", "missing")


def test_extra_tensor(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    edit(folder / "model.safetensors", lambda t: t.update({name: torch.zeros(48)}))
    fails(folder, "model.safetensors", name, "no place")


def test_layer_beyond_the_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ModelError, match=r"layers\.2\..*no place"):
        load_model(read_model_facts(str(folder)), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("shape", [(40, 48), (80, 47), (80, 48, 1)])
def test_wrong_shape(folder: Path, shape: tuple[int, ...]) -> None:
    edit(folder / "model.safetensors", lambda t: t.update({VICTIM: torch.zeros(shape)}))
    fails(folder, "model.safetensors", VICTIM, str(list(shape)), "[80, 48]")


def test_dtype_that_is_no_weight(folder: Path) -> None:
    edit(folder / "model.safetensors", lambda t: t.update({VICTIM: torch.zeros(80, 48, dtype=torch.int8)}))
    fails(folder, "model.safetensors", VICTIM, "I8")


def test_missing_shard(sharded: Path) -> None:
    shard = shard_of(sharded, VICTIM)
    shard.unlink()
    fails(sharded, shard.name, None, "missing")


def test_tensor_missing_from_its_shard(sharded: Path) -> None:
    shard = shard_of(sharded, VICTIM)
    edit(shard, lambda t: t.pop(VICTIM))
    fails(sharded, shard.name, VICTIM, INDEX)


@pytest.mark.parametrize("share", [0.5, 0.99, 0.001, 0.0])
def test_truncated(sharded: Path, share: float) -> None:
    shard = shard_of(sharded, VICTIM)
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * share)])
    fails(sharded, shard.name, None, "truncated")


def test_absurd_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:])
    fails(folder, "model.safetensors", None, "safetensors")


def test_tensor_in_two_files(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    other = next(shard for shard in shards if shard != shard_of(sharded, VICTIM))
    edit(other, lambda t: t.update({VICTIM: torch.zeros(80, 48)}))
    with pytest.raises(ModelError, match="as well"):
        load_model(read_model_facts(str(sharded)), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    fails(sharded, INDEX, None, "weight_map")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").write_bytes(b"")
    fails(folder, "one", None, "safetensors")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"hidden_act": "relu2"}, ["hidden_act", "relu2"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads"]),
        ({"hidden_size": "48"}, ["hidden_size", "'48'"]),
        ({"rope_parameters": {"rope_type": "spiral"}}, ["rope_parameters", "spiral"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters", "factor"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, ["factor", "'two'"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 0}}, ["rope_theta"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            ["short_factor has 1 values instead of 4"],
        ),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_that_cannot_be_honoured(folder: Path, changes: dict[str, Any], words: list[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    fails(folder, "config.json", None, *words)
