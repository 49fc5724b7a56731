"""The plan says what was decided, and why."""

import json
from pathlib import Path

import pytest

from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
    "max_position_embeddings": 2048, "torch_dtype": "float16", "rms_norm_eps": 1e-5,
}  # fmt: skip


def plan(folder: Path, *arguments: str, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    values = parse_arguments([str(folder), *arguments], registry())
    return "\n".join(load(values).plan)


def test_what_options_leave_open_is_explained(tmp_path: Path) -> None:
    text = plan(tmp_path)
    assert "bfloat16 (stored as float16, which has no products on a CPU)" in text
    assert "context of 2048 tokens (what the model allows)" in text
    assert "256 requests (default) and 512 tokens (default on a CPU) in a step" in text
    assert "40% of the free memory (default) in blocks of 16 tokens, as bfloat16; prefix caching on" in text
    assert "engines: 1" in text


def test_what_options_say_is_theirs(tmp_path: Path) -> None:
    text = plan(
        tmp_path, "--dtype", "half", "--max-model-len", "1K", "--max-num-seqs", "4", "--block-size", "32",
        "--kv-cache-memory-bytes", "1M", "--no-enable-prefix-caching", "-dp", "2", "--load-format", "dummy",
            "--kv-cache-dtype", "fp8",
    )  # fmt: skip
    assert "float16 (as --dtype says)" in text
    assert "context of 1024 tokens (as --max-model-len says); at most 4 requests (as --max-num-seqs says)" in text
    assert "1048576 bytes (as --kv-cache-memory-bytes says) in blocks of 32 tokens, as fp8_e4m3; prefix" in text
    assert "prefix caching off" in text
    assert "engines: 2" in text


def test_layers_with_windows_are_told_of(tmp_path: Path) -> None:
    kind = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    gemma = {**kind, "num_hidden_layers": 4, "sliding_window": 64}
    text = plan(tmp_path, **gemma)
    assert "KV layers: 2 groups of up to 2, of which 1 keep the last 64 tokens of a request (default for " in text
    assert "KV layers" not in plan(tmp_path, "--disable-hybrid-kv-cache-manager", **gemma)
    assert "KV layers" not in plan(tmp_path, "--max-model-len", "64", **gemma)
    asked = plan(tmp_path, "--no-disable-hybrid-kv-cache-manager", **gemma)
    assert "(as --disable-hybrid-kv-cache-manager says)" in asked


@pytest.mark.parametrize("option", ["--download-dir", "--hf-token"])
def test_options_of_the_hub_need_something_there(tmp_path: Path, option: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    notes = load(parse_arguments([str(tmp_path), option, "x"], registry())).notes
    assert notes == (f"{option} has no effect: nothing that the options name is on the hub",)
