"""Facts of folders and GGUF files: lengths, end tokens, defaults, and what is said of damaged files."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayllm.config.model_facts import ModelFacts, read_model_facts
from rayllm.errors import ModelError
from tests.models import smollm2_gguf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
Write = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Write:
    """Writes a config, which changes `LLAMA`, and perhaps a generation config."""

    def write(generation: dict[str, Any] | None = None, **changes: Any) -> Path:
        config = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


def facts_of(path: Path) -> ModelFacts:
    return read_model_facts(str(path))


def test_folder(folder: Write) -> None:
    facts = facts_of(folder())
    assert (facts.format, facts.architecture, facts.vocab_size) == ("hf", "LlamaForCausalLM", 100)
    assert (facts.dtype, facts.bos_token_id, facts.eos_token_ids) == ("bfloat16", 1, (2,))
    assert facts.max_model_len == 1024
    assert facts.generation_defaults == {}
    assert facts.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 2048),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}}, 4096),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1024),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [2]}}, 1024),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 1024),
        ({"model_type": "mistral", "sliding_window": 64}, 1024),
        ({"max_position_embeddings": ...}, 2048),
        ({"max_position_embeddings": ..., "model_type": "qwen2"}, 32768),
        ({"max_position_embeddings": ..., "model_type": "unheard", "n_positions": 77}, 77),
        ({"model_max_length": 500}, 500),
    ],
    ids=str,
)
def test_longest_context(folder: Write, changes: dict[str, Any], length: int) -> None:
    assert facts_of(folder(**changes)).max_model_len == length


def test_rope_in_one_form(folder: Write) -> None:
    """Old names and new, nested and not, become the same."""
    rope = facts_of(folder(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})).config["rope_parameters"]
    assert rope == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    old = folder(model_type="phi3", rope_scaling={"type": "su"}, original_max_position_embeddings=256)
    assert facts_of(old).config["rope_parameters"]["rope_type"] == "longrope"
    assert facts_of(old).config["rope_parameters"]["original_max_position_embeddings"] == 256
    gemma = {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    scaled = folder(**gemma, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert facts_of(scaled).config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }


def test_nested_text_config(folder: Write) -> None:
    """A published multimodal Gemma leaves most of its text config out."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 7, "sliding_window": 32}
    only = dict.fromkeys(LLAMA, ...)
    facts = facts_of(
        folder(
            **{
                **only,
                "architectures": ["Gemma3ForConditionalGeneration"],
                "model_type": "gemma3",
                "text_config": text,
                "eos_token_id": [1, 106],
                "torch_dtype": "bfloat16",
            }
        )
    )
    assert facts.architecture == "Gemma3ForConditionalGeneration"
    assert facts.vocab_size == 262208
    assert facts.eos_token_ids == (1, 106)
    assert (facts.config["hidden_size"], facts.config["num_attention_heads"], facts.config["head_dim"]) == (64, 8, 256)
    assert facts.max_model_len == 131072


def test_every_end_token(folder: Write) -> None:
    assert facts_of(folder({"eos_token_id": [5, 2, 7]})).eos_token_ids == (2, 5, 7)
    assert facts_of(folder({"eos_token_id": 9}, eos_token_id=None)).eos_token_ids == (9,)
    assert facts_of(folder({}, eos_token_id=[3, 4])).eos_token_ids == (3, 4)


def test_generation_defaults(folder: Write) -> None:
    given = {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 9}
    expected = {name: value for name, value in given.items() if name != "max_new_tokens"} | {"max_tokens": 9}
    assert facts_of(folder({**given, "do_sample": True, "pad_token_id": 0})).generation_defaults == expected
    assert facts_of(folder({"temperature": None, "top_k": -1})).generation_defaults == {"top_k": 0}


@pytest.mark.parametrize(
    ("generation", "changes", "file", "word"),
    [
        (None, {"architectures": ...}, "config.json", "architectures"),
        (None, {"architectures": []}, "config.json", "architectures"),
        (None, {"vocab_size": ...}, "config.json", "vocab_size"),
        (None, {"vocab_size": "many"}, "config.json", "vocab_size"),
        (None, {"eos_token_id": 100}, "config.json", "eos_token_id: token id 100"),
        (None, {"bos_token_id": -1}, "config.json", "bos_token_id"),
        (None, {"torch_dtype": "int8"}, "config.json", "int8"),
        (None, {"max_position_embeddings": 0}, "config.json", "context length"),
        (None, {"rope_scaling": "much"}, "config.json", "rope_parameters"),
        (None, {"rope_parameters": {"full_attention": {}}}, "config.json", "full_attention"),
        ({"eos_token_id": [2, 4000]}, {}, "generation_config.json", "4000"),
        ({"temperature": "hot"}, {}, "generation_config.json", "temperature"),
        ({"top_p": 0}, {}, "generation_config.json", "top_p"),
        ({"top_p": 1.5}, {}, "generation_config.json", "top_p"),
        ({"max_new_tokens": 0}, {}, "generation_config.json", "max_new_tokens"),
    ],
    ids=str,
)
def test_faults_are_named(
    folder: Write, generation: dict[str, Any] | None, changes: dict[str, Any], file: str, word: str
) -> None:
    with pytest.raises(ModelError, match=word) as caught:
        facts_of(folder(generation, **changes))
    assert Path(caught.value.file).name == file


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00\x01"])
def test_damaged_json(folder: Write, text: str) -> None:
    path = folder()
    (path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        facts_of(path)
    (path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"/config\.json"):
        facts_of(path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        facts_of(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        facts_of(tmp_path)


def test_dtype_from_the_weights(folder: Write) -> None:
    path = folder(torch_dtype=...)
    assert facts_of(path).dtype == "float32"
    header = json.dumps(
        {
            "__metadata__": {},
            "a": {"dtype": "F16", "shape": [8], "data_offsets": [0, 16]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [16, 20]},
        }
    ).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(20))
    assert facts_of(path).dtype == "float16"
    (path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert facts_of(path).dtype == "float32"


@pytest.mark.smollm2
def test_demo_model_quickly() -> None:
    start = time.perf_counter()
    facts = facts_of(smollm2_gguf())
    assert time.perf_counter() - start < 1.0
    assert (facts.format, facts.architecture) == ("gguf", "LlamaForCausalLM")
    assert (facts.vocab_size, facts.max_model_len, facts.dtype) == (49152, 8192, "bfloat16")
    assert (facts.bos_token_id, facts.eos_token_ids) == (1, (2,))
    assert facts.config["tie_word_embeddings"] is True


@pytest.mark.smollm2
def test_folder_that_holds_one_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(smollm2_gguf())
    assert facts_of(tmp_path).format == "gguf"


def test_reads_without_torch() -> None:
    code = "import rayllm.config.model_facts, rayllm.model.families, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
