"""Writes a tiny Hugging Face folder as a GGUF file, with the conventions of ggml's own converter."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.models import VOCAB

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PLAIN = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.sliding_window": "sliding_window",
}
FLOATS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def write_gguf(
    folder: Path,
    file: Path,
    architecture: str,
    kind: str = "F32",
    extra: Mapping[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Path:
    """Write a model's config and weights; matrices as ggml type `kind`, and some extra tensors.

    `metadata` adds keys of the architecture, with `__` for each dot.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), architecture)
    for key, name in PLAIN.items():
        if config.get(name) is not None:
            writer.add_uint32(f"{architecture}.{key}", config[name])
    for key, name in FLOATS.items():
        if config.get(name) is not None:
            writer.add_float32(f"{architecture}.{key}", config[name])
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_uint32(f"{architecture}.attention.key_length", head)
    writer.add_uint32(f"{architecture}.attention.value_length", head)
    for key, value in metadata.items():
        writer.add_key_value(f"{architecture}.{key.replace('__', '.')}", value, _value_type(value))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in load_file(folder / "model.safetensors").items():
        ours = _name(name, architecture)
        values = _converted(name, values, architecture, config, head)
        if values.ndim > 1:
            target = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(ours, gguf.quants.quantize(values, target), raw_dtype=target)
        else:
            writer.add_tensor(ours, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _value_type(value: Any) -> gguf.GGUFValueType:
    return {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}[
        type(value)
    ]


def _name(name: str, architecture: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    number, _, inner = stem.removeprefix("model.layers.").partition(".")
    target = NAMES[inner]
    if inner == "post_attention_layernorm" and architecture in ("gemma2", "gemma3", "olmo2"):
        target = "post_attention_norm"
    return f"blk.{number}.{target}.{kind}"


def _converted(name: str, values: np.ndarray, architecture: str, config: dict[str, Any], head: int) -> np.ndarray:
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return values + 1
    if architecture in ("llama", "granite") and ("q_proj" in name or "k_proj" in name):
        # From halves to pairs.
        return values.reshape(-1, 2, head // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return values
