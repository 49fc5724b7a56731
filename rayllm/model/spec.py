"""What a decoder is, as plain values: a family of models is a `DecoderSpec` made from its config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rayllm.config.kv_cache import head_bytes

NormPlacement = Literal["pre", "post", "both"]
Activation = Literal["silu", "gelu_tanh", "clamped"]
"""Of gated MLPs; `clamped` is GPT-OSS's, with the two numbers that `MoeSpec` holds."""
QKNorm = Literal["none", "head", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position encoding of some layers."""

    theta: float
    size: int
    """Entries of a head that are rotated; even."""
    kind: str = "default"
    """`default`, `linear`, `dynamic`, `llama3`, `yarn`, `longrope`, or `factors` (a divisor for each frequency)."""
    values: Mapping[str, object] = field(default_factory=dict)
    """The kind's own parameters, under Hugging Face's names."""
    trained_positions: int
    """`max_position_embeddings` of the config, which some kinds measure by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-AI, 2024), under the names of its configs.

    A token is cached as one vector for all heads: its rotated key, of `qk_rope_head_dim`, then the latent vector of
    `kv_lora_rank` from which each head has the rest of its key, and its value.
    """

    q_lora_rank: int | None
    """Width of what queries are projected from; None: from the hidden state."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float
    interleaved: bool
    """Weights are stored so that entries rotated together lie side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """How a family names its tensors in a Hugging Face checkpoint.

    `{i}` stands for the number of a layer, `{e}` for that of an expert. The values of `layer` and `top` name a module
    of the decoder and the part of it that a tensor fills, such as `attention.qkv:q`; parts joined by `+` lie one after
    another in one tensor. Names of tensors end with `.weight` or `.bias`; where they do not, the value says which
    parameter it is, such as `attention.sinks@weight`. Modules that a layer does not have are passed over.
    """

    layer: Mapping[str, str]
    top: Mapping[str, str]
    prefixes: tuple[str, ...] = ("model.",)
    """What all names but the head's may begin with; the first that a checkpoint uses holds for all."""
    head_prefixes: tuple[str, ...] = ("",)
    ignored: tuple[str, ...] = ()
    """Beginnings of names that belong to parts which are not served, such as a vision tower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Mixtures of experts in the place of MLPs: of E experts a token goes to K, and their outputs are added.

    The router gives each token a score for each expert; the K best are chosen, and the scores weigh their outputs.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Inner width of one expert."""
    layers: tuple[bool, ...]
    """For each layer, whether it has experts; the others have an MLP."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores."""
    correction: bool = False
    """A learned number for each expert joins the scores for the choice, and only for that (DeepSeek-V3)."""
    groups: int = 1
    """Experts are divided into so many groups, of which the best `groups_per_token` are chosen first."""
    groups_per_token: int = 1
    group_score: Literal["max", "two_best"] = "max"
    """What a group is chosen by: its best score, or the sum of its two best."""
    normalised: bool = False
    """The weights of a token are divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights."""
    input_scaled: bool = False
    """Weights multiply what goes into an expert, instead of what comes out (Llama 4)."""

    router_bias: bool = False
    bias: bool = False
    """Experts have biases."""
    activation: Activation = "silu"
    alpha: float = 1.702
    """Of the activation `clamped`: the factor within the sigmoid."""
    limit: float = 7.0
    """Likewise: the gate is at most this, and what it multiplies no farther from zero."""

    shared_size: int = 0
    """Inner width of an MLP that every token goes through as well; 0 without."""
    shared_gate: bool = False
    """Its output is multiplied by the sigmoid of one product of the token."""

    def __post_init__(self) -> None:
        assert self.num_experts % self.groups == 0, (self.num_experts, self.groups)
        assert self.experts_per_token <= self.num_experts // self.groups * self.groups_per_token
        assert self.group_score == "max" or self.num_experts // self.groups >= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Everything that tells one decoder from another."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int

    windows: tuple[int | None, ...]
    """For each layer: how many tokens it sees, its own included; None sees all."""
    ropes: tuple[RopeSpec, ...]
    layer_rope: tuple[int, ...]
    """For each layer: which of `ropes` it uses."""

    norm_eps: float
    norm_plus_one: bool = False
    """Norms multiply by 1 + weight."""
    norm_placement: NormPlacement = "pre"
    """Norms before attention and MLP, after them (before the addition), or both."""
    qk_norm: QKNorm = "none"
    """Norm of queries and keys before rotation: over each head, or over all heads together."""
    mla: MlaSpec | None = None
    """Attention is latent: `head_size` is then the size of what is cached, of which there is one head."""

    activation: Activation = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False
    """Each query head has one more score, without a value (GPT-OSS)."""
    moe: MoeSpec | None = None

    query_scale: float
    """Multiplies the scores."""
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0
    embedded_scaled: bool = False
    """Whether the embedding of transformers has the scale in what it gives."""
    residual_scale: float = 1.0
    """Multiplies what attention and MLP add to the residual stream."""
    logits_scale: float = 1.0
    """Divides the logits."""
    tied: bool = False
    """The output head is the embedding."""

    names: WeightNames

    def __post_init__(self) -> None:
        assert len(self.windows) == len(self.layer_rope) == self.num_layers
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)
        assert self.moe is None or len(self.moe.layers) == self.num_layers

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in the place of an MLP."""
        return self.moe is not None and self.moe.layers[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The KV cache of one layer on one rank."""

    kind: Literal["full", "sliding"]
    window: int | None
    kv_heads: int
    head_size: int
    dtype: str
    """`float32`, `bfloat16`, `float16`, or a type of eight bits (see `rayllm.config.kv_cache`)."""
    value_in_key: int = 0
    """Entries of a key, the last ones, that are its value as well; 0: values are stored beside the keys."""

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token."""
        return (1 if self.value_in_key else 2) * self.kv_heads * head_bytes(self.dtype, self.head_size)
