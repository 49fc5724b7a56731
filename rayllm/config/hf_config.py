"""Hugging Face configs made uniform: nested text configs flattened, omitted values filled in, one form of rope."""

from collections.abc import Mapping
from typing import Any

_LLAMA_LIKE = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_GEMMA_LIKE = {
    **_LLAMA_LIKE,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "mistral": {
        **_LLAMA_LIKE,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {**_LLAMA_LIKE, "max_position_embeddings": 32768},
    "qwen3": {**_LLAMA_LIKE, "max_position_embeddings": 32768, "head_dim": 128},
    "phi3": {
        **_LLAMA_LIKE,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "gemma2": {
        **_GEMMA_LIKE,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA_LIKE,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    "olmo2": {**_LLAMA_LIKE, "rms_norm_eps": 1e-5},
    "granite": _LLAMA_LIKE,
}
"""What a config of each `model_type` means by leaving a value out."""

_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
)


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with its text config, if it nests one, laid over it, and omitted values filled in.

    `rope_parameters` is then always there: one dict, or for Gemma 3 one for each kind of layer.

    Raises:
        ValueError: values of rope have a form that is not known.
    """
    flat = dict(config)
    text = flat.pop("text_config", None)
    if isinstance(text, Mapping):
        outer_type = flat.get("model_type")
        own = {name: value for name, value in text.items() if value is not None or name not in flat}
        flat |= {**own, "architectures": flat.get("architectures")}
        if "model_type" not in text:
            flat["model_type"] = f"{outer_type}_text"
    filled = {**DEFAULTS.get(str(flat.get("model_type")), {}), **flat}
    filled["rope_parameters"] = _rope_parameters(filled)
    return filled


def max_model_len(config: Mapping[str, Any]) -> int | None:
    """Longest context of a flattened config, in tokens; None if it says nothing.

    Linear, dynamic and YaRN scaling multiply the trained length. The bands of Llama 3.1 and LongRoPE do not, nor do
    the factors of Gemma 3: there the config states the length that results. A sliding window limits nothing.
    """
    lengths = [config[name] for name in _LENGTH_NAMES if isinstance(config.get(name), int)]
    if not lengths:
        return None
    length: int = min(lengths)
    rope = config["rope_parameters"]
    if "rope_type" not in rope or str(config.get("model_type")).startswith("gemma3"):
        return length
    factor = rope.get("factor")
    if rope["rope_type"] not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float):
        return length
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
    return int(length * factor)


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_parameters: must be an object, not {given!r}")
    nested = {kind: values for kind, values in given.items() if isinstance(values, Mapping)}
    if not str(config.get("model_type")).startswith("gemma3"):
        if nested:
            raise ValueError(f"rope_parameters: one for each kind of layer, {sorted(nested)}, is not supported")
        return _uniform_rope(given, config)
    if not nested:
        nested = {"full_attention": given}
    local = {"rope_theta": config.get("rope_local_base_freq"), **nested.get("sliding_attention", {})}
    full = nested.get("full_attention", {})
    return {"full_attention": _uniform_rope(full, config), "sliding_attention": _uniform_rope(local, config)}


def _uniform_rope(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """One set of rope parameters with `rope_type` and `rope_theta` always among them."""
    rope = {name: value for name, value in given.items() if name != "type"}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "su" or (kind == "yarn" and config.get("model_type") == "phi3"):
        kind = "longrope"  # its names before it was published
    rope["rope_type"] = kind
    for name in ("rope_theta", "partial_rotary_factor"):
        if rope.get(name) is None and config.get(name) is not None:
            rope[name] = config[name]
    if kind in _WITH_ORIGINAL_LENGTH:
        own = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        rope["original_max_position_embeddings"] = config.get("original_max_position_embeddings") or own
    return rope
