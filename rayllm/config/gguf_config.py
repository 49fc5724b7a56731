"""The metadata of a GGUF file under Hugging Face's names."""

import struct
from collections.abc import Mapping
from typing import Any

from rayllm.config.gguf_file import GgufFile
from rayllm.config.hf_config import flatten
from rayllm.errors import ModelError

ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "granite": ("GraniteForCausalLM", "granite"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
}
"""ggml's name of an architecture: Hugging Face's, and its model type. Mistral's files call themselves llama."""

_NAMES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.freq_base": "rope_theta",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_NEEDED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
# Layers of the one size of each family whose scores are scaled by width / heads instead of the head size.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


def config_of(file: GgufFile, overrides: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """(architecture, flattened config) of a GGUF model, both as Hugging Face names things.

    `overrides` go over what the file says.

    Raises:
        ModelError: the architecture is not supported, or a value that it needs is missing.
        ConfigError: no model has a value of an override's name.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(file.path, f"general.architecture {name!r} is not supported; these are: {known}")
    architecture, model_type = ARCHITECTURES[name]
    config: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    for key, target in _NAMES.items():
        value = file.metadata.get(f"{name}.{key}")
        if value is not None:
            config[target] = _number(value, f"{name}.{key}", file)
    for key in _NEEDED:
        value = config.get(_NAMES[key])
        if not isinstance(value, int) or value < 1:
            raise ModelError(file.path, f"{name}.{key}: must be a positive integer, not {value!r}")
    _from_tensors(config, file)
    _head_size(config, name, file)
    _sliding_and_scale(config, name)
    config["rope_parameters"] = _rope(config, name, file)
    return architecture, flatten(config, overrides)


def _number(value: Any, key: str, file: GgufFile) -> int | float:
    """A number for all layers, where a file may list one for each."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, int | float) for one in values):
        raise ModelError(file.path, f"{key}: must be a number, not {value!r}")
    if len(set(values)) != 1:
        raise ModelError(file.path, f"{key}: layers that differ, {value}, are not supported")
    number: int | float = values[0]
    return number


def _from_tensors(config: dict[str, Any], file: GgufFile) -> None:
    """What only the tensors tell."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(file.path, "missing, or not a matrix", "token_embd.weight")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors


def _head_size(config: dict[str, Any], name: str, file: GgufFile) -> None:
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if not isinstance(config["head_dim"], int) or config["head_dim"] < 1:
        raise ModelError(file.path, f"{name}.attention.key_length: must be positive, not {config['head_dim']!r}")
    value_size = file.metadata.get(f"{name}.attention.value_length", config["head_dim"])
    if value_size != config["head_dim"]:
        raise ModelError(file.path, f"{name}.attention.value_length: {value_size} differs from key_length")
    rotated = file.metadata.get(f"{name}.rope.dimension_count", config["head_dim"])
    if not isinstance(rotated, int) or not 0 < rotated <= config["head_dim"]:
        raise ModelError(file.path, f"{name}.rope.dimension_count: {rotated!r} is no part of a head")
    if rotated != config["head_dim"]:
        config["partial_rotary_factor"] = rotated / config["head_dim"]


def _sliding_and_scale(config: dict[str, Any], name: str) -> None:
    if not config.get("sliding_window"):
        config.pop("sliding_window", None)  # Gemma's default is a window, that of all others is none
    if name in _SCALED_BY_WIDTH:
        by_width = config["num_hidden_layers"] == _SCALED_BY_WIDTH[name]
        width = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = width if by_width else config["head_dim"]


def _rope(config: Mapping[str, Any], name: str, file: GgufFile) -> dict[str, Any]:
    def value(key: str) -> Any:
        return file.metadata.get(f"{name}.rope.scaling.{key}")

    rope: dict[str, Any] = {"rope_type": "default"}
    kind = value("type")
    if "rope_freqs.weight" in file.tensors:
        rope = {"rope_type": "factors", "factors": _floats(file, "rope_freqs.weight")}
    elif "rope_factors_long.weight" in file.tensors:
        rope = {
            "rope_type": "longrope",
            "long_factor": _floats(file, "rope_factors_long.weight"),
            "short_factor": _floats(file, "rope_factors_short.weight"),
            "attention_factor": value("attn_factor"),
        }
    elif kind == "linear" or (kind is None and file.metadata.get(f"{name}.rope.scale_linear")):
        rope = {"rope_type": "linear", "factor": value("factor") or file.metadata[f"{name}.rope.scale_linear"]}
    elif kind == "yarn":
        rope = {"rope_type": "yarn", "factor": value("factor"), "attention_factor": value("attn_factor")}
    elif kind not in (None, "none"):
        raise ModelError(file.path, f"{name}.rope.scaling.type: {kind!r} is not supported")
    if "rope_theta" in config:
        rope["rope_theta"] = config["rope_theta"]
    return {key: entry for key, entry in rope.items() if entry is not None}


def _floats(file: GgufFile, tensor: str) -> list[float]:
    info = file.tensors.get(tensor)
    if info is None or info.type != "F32":
        raise ModelError(file.path, "missing, or not F32", tensor)
    with open(file.path, "rb") as data:
        data.seek(info.offset)
        return list(struct.unpack(f"<{info.nbytes // 4}f", data.read(info.nbytes)))
