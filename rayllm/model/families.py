"""Families of models: for each architecture, how its config becomes a `DecoderSpec`. Adding one adds an entry."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayllm.config.model_facts import ModelFacts
from rayllm.errors import ModelError
from rayllm.model.spec import DecoderSpec, RopeSpec, WeightNames

_ATTENTION_AND_MLP = {
    "layers.{i}.self_attn.q_proj": "attention.qkv:q",
    "layers.{i}.self_attn.k_proj": "attention.qkv:k",
    "layers.{i}.self_attn.v_proj": "attention.qkv:v",
    "layers.{i}.self_attn.o_proj": "attention.out",
    "layers.{i}.self_attn.q_norm": "attention.q_norm",
    "layers.{i}.self_attn.k_norm": "attention.k_norm",
    "layers.{i}.mlp.gate_proj": "mlp.gate_up:gate",
    "layers.{i}.mlp.up_proj": "mlp.gate_up:up",
    "layers.{i}.mlp.down_proj": "mlp.down",
}
_TOP = {"embed_tokens": "embed", "norm": "norm", "lm_head": "head"}

LLAMA_NAMES = WeightNames(
    layer={
        **_ATTENTION_AND_MLP,
        "layers.{i}.input_layernorm": "input_norm",
        "layers.{i}.post_attention_layernorm": "mlp_norm",
    },
    top=_TOP,
)
PHI3_NAMES = WeightNames(
    layer={
        "layers.{i}.self_attn.qkv_proj": "attention.qkv:q+k+v",
        "layers.{i}.self_attn.o_proj": "attention.out",
        "layers.{i}.mlp.gate_up_proj": "mlp.gate_up:gate+up",
        "layers.{i}.mlp.down_proj": "mlp.down",
        "layers.{i}.input_layernorm": "input_norm",
        "layers.{i}.post_attention_layernorm": "mlp_norm",
    },
    top=_TOP,
)
GEMMA_NAMES = WeightNames(
    layer={
        **_ATTENTION_AND_MLP,
        "layers.{i}.input_layernorm": "input_norm",
        "layers.{i}.post_attention_layernorm": "post_attention_norm",
        "layers.{i}.pre_feedforward_layernorm": "mlp_norm",
        "layers.{i}.post_feedforward_layernorm": "post_mlp_norm",
    },
    top=_TOP,
)
GEMMA3_MULTIMODAL_NAMES = replace(
    GEMMA_NAMES,
    prefixes=("model.language_model.", "language_model.model."),
    head_prefixes=("", "language_model."),
    ignored=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
)


def spec_of(facts: ModelFacts) -> DecoderSpec:
    """The decoder that a model's config describes.

    Raises:
        ModelError: the architecture is unknown, or its config asks for something that is not supported.
    """
    family = FAMILIES.get(facts.architecture)
    if family is None:
        known = f"not supported; these are: {', '.join(sorted(FAMILIES))}"
        raise ModelError(config_file(facts), f"architecture {facts.architecture!r} is {known}")
    return family(_Config(facts))


def config_file(facts: ModelFacts) -> str:
    """The file that a fault of the config is in."""
    return facts.path if facts.format == "gguf" else str(Path(facts.path) / "config.json")


class _Config:
    """A config whose values are checked as they are taken."""

    def __init__(self, facts: ModelFacts) -> None:
        self.values, self.file = facts.config, config_file(facts)

    def error(self, name: str, reason: str) -> ModelError:
        return ModelError(self.file, f"{name}: {reason}")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive number."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"must be a positive integer, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, f"must be a number, not {value!r}")
        return value

    def optional(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        return bool(value)

    def refuse(self, name: str, *unless: Any) -> None:
        """Refuse a value that would change the model in a way the decoder does not know."""
        value = self.values.get(name)
        if value and value not in unless:
            raise self.error(name, f"{value!r} is not supported")


_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def _activation(config: _Config, *names: str) -> str:
    for name in names:
        value = config.values.get(name)
        if value is not None:
            if value not in _ACTIVATIONS:
                raise config.error(name, f"{value!r} is not supported; these are: {', '.join(_ACTIVATIONS)}")
            return _ACTIVATIONS[value]
    raise config.error(names[0], "missing")


_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "factors": ("factors",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}


def _rope(config: _Config, values: Mapping[str, Any], head_size: int) -> RopeSpec:
    kind = values.get("rope_type", "default")
    if kind not in _ROPE_NEEDS:
        known = f"not supported; these are: {', '.join(_ROPE_NEEDS)}"
        raise config.error("rope_parameters", f"rope_type {kind!r} is {known}")
    for name in _ROPE_NEEDS[kind]:
        if values.get(name) is None:
            raise config.error("rope_parameters", f"rope_type {kind!r} needs {name}")
    size = int(head_size * (values.get("partial_rotary_factor") or 1.0))
    if size < 2 or size % 2:
        raise config.error("rope_parameters", f"rotates {size} entries of a head, which must be even")
    for name in ("short_factor", "long_factor", "factors"):
        if name in _ROPE_NEEDS[kind] and len(values[name]) != size // 2:
            raise config.error("rope_parameters", f"{name} has {len(values[name])} values instead of {size // 2}")
    own = {name: value for name, value in values.items() if name not in ("rope_type", "rope_theta", "type")}
    theta, trained = values.get("rope_theta", 10000.0), config.size("max_position_embeddings")
    return RopeSpec(theta=float(theta), size=size, kind=kind, values=own, trained_positions=trained)


def _base(config: _Config, **changes: Any) -> DecoderSpec:
    """What Llama-like configs have in common; `changes` override."""
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    layers = config.size("num_hidden_layers")
    head_size = config.size("head_dim", max(1, config.size("hidden_size") // heads))
    ropes = (_rope(config, config.values.get("rope_parameters") or {}, head_size),)
    plain: dict[str, Any] = {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": config.size("hidden_size"),
        "intermediate_size": config.size("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "windows": (None,) * layers,
        "ropes": ropes,
        "layer_rope": (0,) * layers,
        "norm_eps": config.number("rms_norm_eps"),
        "query_scale": head_size**-0.5,
        "tied": config.flag("tie_word_embeddings"),
        "names": LLAMA_NAMES,
    }
    if "activation" not in changes:
        plain["activation"] = _activation(config, "hidden_act")
    return DecoderSpec(**{**plain, **changes})


def _llama(config: _Config) -> DecoderSpec:
    bias = config.flag("attention_bias")
    return _base(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias"))


FAMILIES: Mapping[str, Callable[[_Config], DecoderSpec]] = {
    "LlamaForCausalLM": _llama,
}
