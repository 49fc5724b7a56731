"""Families of models: for each architecture, how its config becomes a `DecoderSpec`. Adding one adds an entry."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayllm.config.model_facts import ModelFacts
from rayllm.errors import ModelError
from rayllm.model.spec import DecoderSpec, MlaSpec, MoeSpec, RopeSpec, WeightNames

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
OLMO2_NAMES = WeightNames(
    layer={
        **_ATTENTION_AND_MLP,
        "layers.{i}.post_attention_layernorm": "post_attention_norm",
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
_ROUTED_EXPERTS = {
    "layers.{i}.mlp.gate": "mlp.router",
    "layers.{i}.mlp.experts.{e}.gate_proj": "mlp.experts.{e}:gate",
    "layers.{i}.mlp.experts.{e}.up_proj": "mlp.experts.{e}:up",
    "layers.{i}.mlp.experts.{e}.down_proj": "mlp.experts.{e}:down",
}
MIXTRAL_NAMES = replace(
    LLAMA_NAMES,
    layer={
        **LLAMA_NAMES.layer,
        "layers.{i}.block_sparse_moe.gate": "mlp.router",
        "layers.{i}.block_sparse_moe.experts.{e}.w1": "mlp.experts.{e}:gate",
        "layers.{i}.block_sparse_moe.experts.{e}.w3": "mlp.experts.{e}:up",
        "layers.{i}.block_sparse_moe.experts.{e}.w2": "mlp.experts.{e}:down",
    },
)
QWEN_MOE_NAMES = replace(
    LLAMA_NAMES,
    layer={
        **LLAMA_NAMES.layer,
        **_ROUTED_EXPERTS,
        "layers.{i}.mlp.shared_expert.gate_proj": "mlp.shared.gate_up:gate",
        "layers.{i}.mlp.shared_expert.up_proj": "mlp.shared.gate_up:up",
        "layers.{i}.mlp.shared_expert.down_proj": "mlp.shared.down",
        "layers.{i}.mlp.shared_expert_gate": "mlp.shared_gate",
    },
)
DEEPSEEK_MOE = {
    **_ROUTED_EXPERTS,
    "layers.{i}.mlp.gate.e_score_correction_bias": "mlp.router@correction",
    "layers.{i}.mlp.shared_experts.gate_proj": "mlp.shared.gate_up:gate",
    "layers.{i}.mlp.shared_experts.up_proj": "mlp.shared.gate_up:up",
    "layers.{i}.mlp.shared_experts.down_proj": "mlp.shared.down",
}
"""Experts as DeepSeek names them, and those who follow it."""
_MLA_NAMES = WeightNames(
    layer={
        **{stem: place for stem, place in LLAMA_NAMES.layer.items() if ".self_attn." not in stem},
        **DEEPSEEK_MOE,
        "layers.{i}.self_attn.kv_a_proj_with_mqa": "attention.kv_a",
        "layers.{i}.self_attn.kv_a_layernorm": "attention.kv_a_norm",
        "layers.{i}.self_attn.kv_b_proj": "attention.kv_b:kv",
        "layers.{i}.self_attn.o_proj": "attention.out",
    },
    top=_TOP,
)
DEEPSEEK_LITE_NAMES = replace(_MLA_NAMES, layer={**_MLA_NAMES.layer, "layers.{i}.self_attn.q_proj": "attention.q"})
DEEPSEEK_NAMES = replace(
    _MLA_NAMES,
    layer={
        **_MLA_NAMES.layer,
        "layers.{i}.self_attn.q_a_proj": "attention.q_a:q",
        "layers.{i}.self_attn.q_a_layernorm": "attention.q_a_norm",
        "layers.{i}.self_attn.q_b_proj": "attention.q",
    },
)
GLM4_MOE_NAMES = replace(LLAMA_NAMES, layer={**LLAMA_NAMES.layer, **DEEPSEEK_MOE})
GPT_OSS_NAMES = replace(
    LLAMA_NAMES,
    layer={
        **LLAMA_NAMES.layer,
        "layers.{i}.self_attn.sinks": "attention.sinks@weight",
        "layers.{i}.mlp.router": "mlp.router",
        "layers.{i}.mlp.experts.gate_up_proj": "mlp.experts:gate_up@weight",
        "layers.{i}.mlp.experts.gate_up_proj_bias": "mlp.experts:gate_up@bias",
        "layers.{i}.mlp.experts.down_proj": "mlp.experts:down@weight",
        "layers.{i}.mlp.experts.down_proj_bias": "mlp.experts:down@bias",
    },
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
    spec = family(_Config(facts))
    if not facts.windows:
        spec = replace(spec, windows=(None,) * spec.num_layers)
    # Files of GGUF format hold the norm weights of Gemma with the one added.
    return replace(spec, norm_plus_one=False) if facts.format == "gguf" else spec


def without_windows(facts: ModelFacts) -> ModelFacts:
    """The facts of a model whose layers see everything, with no more context than the windows had; the same facts
    where there are no windows.

    Raises:
        ModelError: as `spec_of`.
    """
    windows = [window for window in spec_of(facts).windows if window is not None]
    if not windows:
        return facts
    return replace(facts, windows=False, max_model_len=min(facts.max_model_len, *windows))


def config_file(facts: ModelFacts) -> str:
    """The file that a fault of the config is in."""
    if facts.format == "gguf":
        return facts.path
    return facts.config_file or str(Path(facts.path) / "config.json")


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


_ROPE_LISTS = ("short_factor", "long_factor", "factors")
_ROPE_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "factor")


def _rope(config: _Config, values: Mapping[str, Any], head_size: int) -> RopeSpec:
    kind = values.get("rope_type", "default")
    if kind not in _ROPE_NEEDS:
        known = f"not supported; these are: {', '.join(_ROPE_NEEDS)}"
        raise config.error("rope_parameters", f"rope_type {kind!r} is {known}")
    size = int(head_size * (values.get("partial_rotary_factor") or 1.0))
    if size < 2 or size % 2:
        raise config.error("rope_parameters", f"rotates {size} entries of a head, which must be even")
    for name in (*_ROPE_NEEDS[kind], "rope_theta", *_ROPE_OPTIONAL):
        value = values.get(name)
        if value is None and name in _ROPE_NEEDS[kind]:
            raise config.error("rope_parameters", f"rope_type {kind!r} needs {name}")
        numbers = value if name in _ROPE_LISTS and isinstance(value, list) else [value]
        if value is not None and not all(isinstance(one, int | float) and one > 0 for one in numbers):
            raise config.error("rope_parameters", f"{name}: must be positive, not {value!r}")
        if name in _ROPE_LISTS and len(numbers) != size // 2:
            raise config.error("rope_parameters", f"{name} has {len(numbers)} values instead of {size // 2}")
    own = {name: value for name, value in values.items() if name not in ("rope_type", "rope_theta")}
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
    plain: dict[str, Any] = {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": config.size("hidden_size"),
        "intermediate_size": config.size("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "windows": (None,) * layers,
        "layer_rope": (0,) * layers,
        "norm_eps": config.number("rms_norm_eps"),
        "query_scale": head_size**-0.5,
        "tied": config.flag("tie_word_embeddings"),
        "names": LLAMA_NAMES,
    }
    if "ropes" not in changes:
        plain["ropes"] = (_rope(config, config.values["rope_parameters"], head_size),)
    if "activation" not in changes:
        plain["activation"] = _activation(config, "hidden_act")
    return DecoderSpec(**{**plain, **changes})


def _windows(config: _Config, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: as `layer_types` says, or else of the layers that slide by the family's rule."""
    layers = config.size("num_hidden_layers")
    kinds = config.values.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if slides(i) else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.error("layer_types", f"must list one kind for each of the {layers} layers")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise config.error("layer_types", f"{sorted(map(str, unknown))} are not supported")
    return tuple(config.size("sliding_window") if kind == "sliding_attention" else None for kind in kinds)


def _biases(config: _Config) -> dict[str, bool]:
    bias = config.flag("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": config.flag("mlp_bias")}


def _llama(config: _Config) -> DecoderSpec:
    return _base(config, **_biases(config))


def _mistral(config: _Config) -> DecoderSpec:
    sliding = config.values.get("sliding_window") is not None
    return _base(config, windows=_windows(config, lambda i: sliding))


def _qwen_windows(config: _Config) -> tuple[int | None, ...]:
    if not config.flag("use_sliding_window"):
        return (None,) * config.size("num_hidden_layers")
    full = config.number("max_window_layers", 28)
    return _windows(config, lambda i: i >= full)


def _qwen2(config: _Config) -> DecoderSpec:
    return _base(config, qkv_bias=True, windows=_qwen_windows(config))


def _qwen3(config: _Config) -> DecoderSpec:
    bias = config.flag("attention_bias")
    return _base(config, qkv_bias=bias, out_bias=bias, qk_norm="head", windows=_qwen_windows(config))


def _phi3(config: _Config) -> DecoderSpec:
    sliding = config.values.get("sliding_window") is not None
    return _base(config, windows=_windows(config, lambda i: sliding), names=PHI3_NAMES)


def _olmo2(config: _Config) -> DecoderSpec:
    bias = config.flag("attention_bias")
    return _base(config, qkv_bias=bias, out_bias=bias, norm_placement="post", qk_norm="all", names=OLMO2_NAMES)


def _granite(config: _Config) -> DecoderSpec:
    return _base(
        config,
        **_biases(config),
        query_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logits_scale=config.number("logits_scaling", 1.0),
    )


def _gemma(config: _Config, **changes: Any) -> DecoderSpec:
    """What the second and third Gemma have in common."""
    config.refuse("use_bidirectional_attention")
    bias = config.flag("attention_bias")
    plain: dict[str, Any] = {
        "qkv_bias": bias,
        "out_bias": bias,
        "activation": _activation(config, "hidden_activation", "hidden_act"),
        "norm_placement": "both",
        "norm_plus_one": True,
        "query_scale": config.number("query_pre_attn_scalar") ** -0.5,
        "embedding_scale": config.size("hidden_size") ** 0.5,
        "embedded_scaled": True,
        "attention_soft_cap": config.optional("attn_logit_softcapping"),
        "final_soft_cap": config.optional("final_logit_softcapping"),
        "names": GEMMA_NAMES,
    }
    return _base(config, **{**plain, **changes})


def _gemma2(config: _Config) -> DecoderSpec:
    return _gemma(config, windows=_windows(config, lambda i: i % 2 == 0))


def _gemma3(config: _Config, names: WeightNames = GEMMA_NAMES) -> DecoderSpec:
    pattern = config.size("sliding_window_pattern", 6)
    windows = _windows(config, lambda i: (i + 1) % pattern != 0)
    ropes = config.values["rope_parameters"]
    return _gemma(
        config,
        windows=windows,
        qk_norm="head",
        ropes=tuple(_rope(config, ropes[kind], config.size("head_dim")) for kind in _GEMMA3_ROPES),
        layer_rope=tuple(0 if window is None else 1 for window in windows),
        names=names,
    )


_GEMMA3_ROPES = ("full_attention", "sliding_attention")


def _gemma3_multimodal(config: _Config) -> DecoderSpec:
    """The text part of a model that also sees; pictures are refused elsewhere."""
    return _gemma3(config, GEMMA3_MULTIMODAL_NAMES)


def experts_of(config: _Config, names: tuple[str, ...], layers: Iterable[bool], **more: Any) -> MoeSpec:
    """The experts of a config, whose number stands under one of `names`; `more` says what they are like."""
    name = next((name for name in names if config.values.get(name) is not None), names[0])
    count, chosen = config.size(name), config.size("num_experts_per_tok")
    groups, best = more.get("groups", 1), more.get("groups_per_token", 1)
    if count % groups:
        raise config.error("n_group", f"{groups} groups cannot divide {count} experts")
    if best > groups:
        raise config.error("topk_group", f"{best} of {groups} groups cannot be chosen")
    if chosen > count // groups * best:
        raise config.error("num_experts_per_tok", f"{chosen} of {count // groups * best} experts cannot be chosen")
    if more.get("group_score") == "two_best" and groups > 1 and count // groups < 2:
        raise config.error("n_group", "a group is chosen by its two best experts, and has one")
    return MoeSpec(num_experts=count, experts_per_token=chosen, layers=tuple(layers), **more)


def _mixtral(config: _Config) -> DecoderSpec:
    sliding, layers = config.values.get("sliding_window") is not None, config.size("num_hidden_layers")
    size = config.size("intermediate_size")
    moe = experts_of(
        config, ("num_local_experts", "num_experts"), [True] * layers, intermediate_size=size, normalised=True,
        activation=_activation(config, "hidden_act"),
    )  # fmt: skip
    return _base(config, windows=_windows(config, lambda i: sliding), moe=moe, names=MIXTRAL_NAMES)


def _qwen_experts(config: _Config, **more: Any) -> MoeSpec:
    dense, every = config.values.get("mlp_only_layers") or [], config.size("decoder_sparse_step", 1)
    if not isinstance(dense, list):
        raise config.error("mlp_only_layers", f"must be a list of layers, not {dense!r}")
    layers = [i not in dense and (i + 1) % every == 0 for i in range(config.size("num_hidden_layers"))]
    return experts_of(
        config, ("num_experts", "num_local_experts"), layers, intermediate_size=config.size("moe_intermediate_size"),
        normalised=config.flag("norm_topk_prob"), activation=_activation(config, "hidden_act"), **more,
    )  # fmt: skip


def _qwen2_moe(config: _Config) -> DecoderSpec:
    sliding, first = config.flag("use_sliding_window"), config.number("max_window_layers", 28)
    windows = _windows(config, lambda i: i % 2 == 0 and i < first) if sliding else None
    shared = config.size("shared_expert_intermediate_size")
    return _base(
        config, qkv_bias=config.flag("qkv_bias", True), moe=_qwen_experts(config, shared_size=shared, shared_gate=True),
        windows=windows or (None,) * config.size("num_hidden_layers"), names=QWEN_MOE_NAMES,
    )  # fmt: skip


def _qwen3_moe(config: _Config) -> DecoderSpec:
    bias, sliding = config.flag("attention_bias"), config.flag("use_sliding_window")
    window = config.size("sliding_window") if sliding and config.values.get("sliding_window") is not None else None
    return _base(
        config, qkv_bias=bias, out_bias=bias, qk_norm="head", moe=_qwen_experts(config),
        windows=(window,) * config.size("num_hidden_layers"), names=QWEN_MOE_NAMES,
    )  # fmt: skip


def _glm4_moe(config: _Config) -> DecoderSpec:
    layers, dense = config.size("num_hidden_layers"), config.values.get("first_k_dense_replace", 1)
    if not isinstance(dense, int):
        raise config.error("first_k_dense_replace", f"must be a whole number, not {dense!r}")
    size = config.size("moe_intermediate_size")
    moe = experts_of(
        config, ("n_routed_experts", "num_local_experts"), [i >= dense for i in range(layers)],
        intermediate_size=size, scores="sigmoid", correction=True, groups=config.size("n_group", 1),
        groups_per_token=config.size("topk_group", 1), group_score="two_best",
        normalised=config.flag("norm_topk_prob", True), scale=config.number("routed_scaling_factor", 1.0),
        activation=_activation(config, "hidden_act"), shared_size=size * config.size("n_shared_experts", 1),
    )  # fmt: skip
    return _base(
        config, qkv_bias=config.flag("attention_bias"), qk_norm="head" if config.flag("use_qk_norm") else "none",
        moe=moe, names=GLM4_MOE_NAMES,
    )  # fmt: skip


def _gpt_oss(config: _Config) -> DecoderSpec:
    if config.values.get("quantization_config"):
        cure = "take a checkpoint in bfloat16, as transformers saves one loaded with Mxfp4Config(dequantize=True)"
        raise config.error("quantization_config", f"experts in MXFP4 are not supported; {cure}")
    layers, bias = config.size("num_hidden_layers"), config.flag("attention_bias", True)
    moe = experts_of(
        config, ("num_local_experts", "num_experts"), [True] * layers,
        intermediate_size=config.size("intermediate_size"), normalised=True, router_bias=True, bias=True,
        activation="clamped", alpha=config.number("swiglu_alpha", 1.702), limit=config.number("swiglu_limit", 7.0),
    )  # fmt: skip
    return _base(
        config, qkv_bias=bias, out_bias=bias, sinks=True, windows=_windows(config, lambda i: i % 2 == 0), moe=moe,
        names=GPT_OSS_NAMES,
    )  # fmt: skip


def _deepseek(config: _Config, **changes: Any) -> DecoderSpec:
    """What the second and third DeepSeek have in common."""
    latent, rotated = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
    unrotated = config.size("qk_nope_head_dim")
    low = None if config.values.get("q_lora_rank") is None else config.size("q_lora_rank")
    bias = config.flag("attention_bias")
    rope = _rope(config, config.values["rope_parameters"], rotated)
    if rope.size != rotated:
        raise config.error("rope_parameters", f"rotates {rope.size} of qk_rope_head_dim {rotated} entries")
    plain: dict[str, Any] = {
        "num_kv_heads": 1,
        "head_size": rotated + latent,
        "query_scale": (unrotated + rotated) ** -0.5 * _mscale(config, rope) ** 2,
        "ropes": (rope,),
        "qkv_bias": bias,
        "out_bias": bias,
        "names": DEEPSEEK_LITE_NAMES if low is None else DEEPSEEK_NAMES,
        "mla": MlaSpec(
            q_lora_rank=low,
            kv_lora_rank=latent,
            qk_nope_head_dim=unrotated,
            qk_rope_head_dim=rotated,
            v_head_dim=config.size("v_head_dim"),
            norm_eps=_LATENT_EPS,
            interleaved=config.flag("rope_interleave", default=True),
        ),
    }
    return _base(config, **{**plain, **changes})


_LATENT_EPS = 1e-6
"""Of the norms of latent vectors, whatever `rms_norm_eps` says."""


def _mscale(config: _Config, rope: RopeSpec) -> float:
    """What a stretched rope multiplies queries and keys by, beside the factor of its cosines and sines."""
    weight = rope.values.get("mscale_all_dim")
    if rope.kind == "default" or not isinstance(weight, int | float):
        return 1.0
    factor = rope.values.get("factor")
    if not isinstance(factor, int | float):
        raise config.error("rope_parameters", "mscale_all_dim needs factor")
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _deepseek_experts(config: _Config, **more: Any) -> MoeSpec | None:
    """Experts as DeepSeek has them, behind some layers with MLPs; None if there are no others."""
    config.refuse("moe_layer_freq", 1)
    layers, dense = config.size("num_hidden_layers"), config.values.get("first_k_dense_replace", 0)
    if not isinstance(dense, int):
        raise config.error("first_k_dense_replace", f"must be a whole number, not {dense!r}")
    if dense >= layers:
        return None
    size = config.size("moe_intermediate_size")
    return experts_of(
        config, ("n_routed_experts", "num_local_experts"), [i >= dense for i in range(layers)], intermediate_size=size,
        scale=config.number("routed_scaling_factor", 1.0), activation=_activation(config, "hidden_act"),
        shared_size=size * config.size("n_shared_experts", 1), **more,
    )  # fmt: skip


def _groups(config: _Config) -> dict[str, int]:
    return {"groups": config.size("n_group", 1), "groups_per_token": config.size("topk_group", 1)}


def _deepseek2(config: _Config) -> DecoderSpec:
    config.refuse("scoring_func", "softmax")
    config.refuse("topk_method", "greedy", "group_limited_greedy")
    config.refuse("norm_topk_prob")
    groups = _groups(config) if config.values.get("topk_method") == "group_limited_greedy" else {}
    return _deepseek(config, mlp_bias=config.flag("mlp_bias"), moe=_deepseek_experts(config, **groups))


def _deepseek3(config: _Config) -> DecoderSpec:
    config.refuse("scoring_func", "sigmoid")
    config.refuse("topk_method", "noaux_tc")
    normalised = config.flag("norm_topk_prob", default=True)
    return _deepseek(
        config,
        moe=_deepseek_experts(
            config, scores="sigmoid", correction=True, group_score="two_best", normalised=normalised, **_groups(config)
        ),
    )


FAMILIES: Mapping[str, Callable[[_Config], DecoderSpec]] = {
    "DeepseekV2ForCausalLM": _deepseek2,
    "DeepseekV3ForCausalLM": _deepseek3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_multimodal,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": _granite,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Olmo2ForCausalLM": _olmo2,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
