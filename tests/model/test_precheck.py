"""A model that cannot load is refused before Ray is started, by name and without torch."""

import json
import struct
from pathlib import Path

import pytest

from rayllm.config.hardware import Hardware
from rayllm.config.model_facts import ModelFacts
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.resolve import resolve_engine
from rayllm.errors import ConfigError, ModelError
from rayllm.model.precheck import check_model

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def config_of(folder: Path, *arguments: str, architecture="LlamaForCausalLM"):
    facts = ModelFacts(
        path=str(folder),
        format="hf",
        architecture=architecture,
        config=CONFIG,
        vocab_size=100,
        max_model_len=2048,
        dtype="float32",
    )
    values = parse_arguments([str(folder), *arguments], registry())
    return resolve_engine(values, facts, Hardware(cpus=1, memory=2**30))


def write(file: Path, cut=0, header=None):
    header = header or {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + bytes(16)
    file.write_bytes(whole[: len(whole) - cut])


def test_a_whole_model_passes(tmp_path):
    write(tmp_path / "model.safetensors")
    write(tmp_path / "consolidated.safetensors", cut=5)
    check_model(config_of(tmp_path))


def test_weights_elsewhere_are_left_to_the_engines(tmp_path):
    check_model(config_of(tmp_path))


@pytest.mark.parametrize("cut", [1, 16, 40, 1000])
def test_a_file_cut_short_is_named(tmp_path, cut):
    file = tmp_path / "model.safetensors"
    write(file, cut)
    with pytest.raises(ModelError, match="fetch it again") as caught:
        check_model(config_of(tmp_path))
    assert str(file) in str(caught.value)
    check_model(config_of(tmp_path, "--load-format", "dummy"))


@pytest.mark.parametrize("header", [[1], {"a": 1}, {"a": {}}, {"a": {"data_offsets": []}}])
def test_a_strange_header_is_refused(tmp_path, header):
    write(tmp_path / "model.safetensors", header=header)
    with pytest.raises(ModelError, match="not a safetensors file"):
        check_model(config_of(tmp_path))


def test_an_unknown_family_is_named(tmp_path):
    with pytest.raises(ModelError, match="FooForCausalLM"):
        check_model(config_of(tmp_path, architecture="FooForCausalLM"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-tp", "5"), "--tensor-parallel-size: 5 ranks cannot divide 4 query heads"),
        (("-pp", "4"), "--pipeline-parallel-size: 4 stages cannot divide 3 layers"),
        (("-tp", "2", "--model-impl", "transformers"), "--tensor-parallel-size: .* by the code of transformers"),
    ],
)
@pytest.mark.option("tensor-parallel-size", "pipeline-parallel-size")
def test_workers_that_cannot_divide_a_model(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(config_of(tmp_path, *arguments))
