"""Hugging Face configs made uniform: nested text configs flattened, omitted values filled in, one form of rope."""

import difflib
from collections.abc import Mapping
from typing import Any

from rayllm.errors import ConfigError

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
_DEEPSEEK_LIKE = {
    **_LLAMA_LIKE,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 1.0,
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
    "deepseek_v2": {
        **_DEEPSEEK_LIKE,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "topk_method": "greedy",
    },
    "deepseek_v3": {
        **_DEEPSEEK_LIKE,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    "mixtral": {
        **_LLAMA_LIKE,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        **_LLAMA_LIKE,
        "max_position_embeddings": 32768,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        **_LLAMA_LIKE,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "glm4_moe": {
        **_LLAMA_LIKE,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
    },
    "gpt_oss": {
        **_LLAMA_LIKE,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
    },
}
"""What a config of each `model_type` means by leaving a value out."""

_ROPE_NAMES = ("rope_parameters", "rope_scaling", "rope_theta")
_OFTEN_ABSENT = (
    *_ROPE_NAMES, "architectures", "model_type", "dtype", "torch_dtype", "vocab_size", "hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "attention_bias", "mlp_bias", "layer_types", "use_sliding_window", "max_window_layers", "partial_rotary_factor",
    "original_max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_sequence_length", "bos_token_id", "eos_token_id", "attention_multiplier", "embedding_multiplier",
    "residual_multiplier", "logits_scaling", "use_bidirectional_attention", "num_experts", "num_local_experts",
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip
"""Values that a model may have, beside those with a default."""

_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
_OLDER_NAMES = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
"""As GPT-2 has them."""
_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
)


def flatten(config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config with its text config, if it nests one, laid over it, and omitted values filled in.

    `overrides` go over what it says. `rope_parameters` is then always there: one dict, or for Gemma 3 one for each
    kind of layer.

    Raises:
        ValueError: values of rope have a form that is not known.
        ConfigError: no model has a value of an override's name.
    """
    flat = dict(config)
    text = flat.pop("text_config", None)
    if isinstance(text, Mapping):
        outer_type = flat.get("model_type")
        own = {name: value for name, value in text.items() if value is not None or name not in flat}
        flat |= {**own, "architectures": flat.get("architectures")}
        if "model_type" not in text:
            flat["model_type"] = f"{outer_type}_text"
    if overrides:
        flat = _overridden(flat, overrides)
    flat |= {ours: flat[name] for name, ours in _OLDER_NAMES.items() if name in flat and ours not in flat}
    filled = {**DEFAULTS.get(str(flat.get("model_type")), {}), **flat}
    filled["rope_parameters"] = _rope_parameters(filled)
    return filled


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config with other values laid over it: objects key by key, all else replaced."""
    nested = overrides.get("text_config")
    changes = {**overrides, **nested} if isinstance(nested, Mapping) else dict(overrides)
    changes.pop("text_config", None)
    known = {*config, *_OFTEN_ABSENT, *(name for values in DEFAULTS.values() for name in values)}
    for name in changes.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        cure = f"did you mean {near[0]}?" if near else "leave it out"
        raise ConfigError(f"--hf-overrides.{name}", "no model's config has such a value", cure)
    flat = dict(config)
    for name, value in changes.items():
        if name not in _ROPE_NAMES:
            flat[name] = _merged(flat.get(name), value)
    kinds, layers = flat.get("layer_types"), flat.get("num_hidden_layers")
    if "layer_types" not in changes and isinstance(kinds, list) and isinstance(layers, int):
        flat["layer_types"] = kinds[:layers]
    rope = {name: changes[name] for name in _ROPE_NAMES if name in changes}
    return _with_rope(flat, rope) if rope else flat


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}
    return new


def _with_rope(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config whose rope is changed, in whichever of its spellings either is written."""
    old = config.get("rope_parameters") or config.get("rope_scaling") or {}
    names = [name for name in _ROPE_NAMES[:2] if name in changes]
    given = changes[names[0]] if names else {}
    if given is None:
        given = {"rope_type": "default"}
    flat = {name: value for name, value in config.items() if name != "rope_scaling"}
    if not isinstance(old, Mapping) or not isinstance(given, Mapping):
        return {**flat, "rope_parameters": given}
    theta = {"rope_theta": changes["rope_theta"]} if "rope_theta" in changes else {}
    kinds = [kind for kind, values in {**old, **given}.items() if isinstance(values, Mapping)]
    if not kinds:
        return {**flat, "rope_parameters": {**_replaced(old, given), **theta}}
    # One for each kind of layer; what is given for none of them is for the layers that see everything.
    loose = {name: value for name, value in given.items() if name not in kinds}
    rope = {kind: _replaced(old.get(kind, {}), given.get(kind, {})) for kind in kinds}
    rope["full_attention"] = {**_replaced(rope.get("full_attention", {}), loose), **theta}
    return {**flat, "rope_parameters": rope}


def _replaced(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters changed. Those that name a type displace what belongs to the old type."""
    if "rope_type" in new or "type" in new:
        old = {name: value for name, value in old.items() if name in ("rope_theta", "partial_rotary_factor")}
    return {**old, **new}


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
        if nested and config.get("model_type") not in DEFAULTS:
            return dict(given)  # of a class that transformers runs
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
