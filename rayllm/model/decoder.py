"""The one decoder. What makes a family of models is in its `DecoderSpec`.

Letters of shapes: T tokens of a step, D width, N query heads, G key/value heads, H head size (both on this rank),
R rows that need logits, V vocabulary.
"""

import logging

import numpy as np
import torch
from torch import Tensor, nn

from rayllm.config.kv_cache import LAYER_SCALED, KvCacheSettings
from rayllm.kv.layout import KVLayout
from rayllm.model.division import check_division
from rayllm.model.layers import (
    ColumnLinear,
    Embedded,
    Norm,
    Part,
    Placement,
    RowLinear,
    Sinks,
    SplitNorm,
    VocabTable,
    split_heads,
    split_inner,
)
from rayllm.model.mla import LatentAttention
from rayllm.model.moe import HeldOf, Moe
from rayllm.model.rope import Rope
from rayllm.model.spec import CacheSpec, DecoderSpec
from rayllm.parallel.group import Group
from rayllm_kernels import AttentionBatch, storage
from rayllm_kernels.sampling import REFERENCE
from rayllm_kernels.storage import DTYPES

log = logging.getLogger(__name__)


class Decoder(nn.Module):
    """A decoder-only transformer over a paged KV cache, or one rank's share of it.

    Its parameters are not filled yet; `rayllm.model.loader.load_model` makes a usable one.
    """

    sampling = REFERENCE
    """What chooses tokens by the logits."""

    def __init__(
        self,
        spec: DecoderSpec,
        place: Placement,
        max_model_len: int,
        layout: KVLayout | None = None,
        kv_cache: KvCacheSettings | None = None,
        held: HeldOf | None = None,
    ) -> None:
        """`max_model_len` is the longest context that will be served, in tokens; `layout` how layers share KV blocks;
        `held` says which experts this rank holds whole (without it, ranks divide each).

        Raises:
            ConfigError: the ranks cannot divide the model.
        """
        super().__init__()
        check_division(spec, place.group.size, place.ranks.stages)
        self.spec, self.place, self.ranks = spec, place, place.ranks
        self.numbers = self.ranks.layers(spec.num_layers)
        """Which layers of the model these are."""
        self.layout = (layout or KVLayout()).of_layers(self.numbers)
        """Of these layers, numbered from 0."""
        self._layer_group = [group for group, _ in self.layout.places(len(self.numbers))]
        self._kv_cache = kv_cache or KvCacheSettings()
        self.measures_scales = self._kv_cache.measures_scales and self._kv_cache.dtype in LAYER_SCALED
        """Whether the first step will measure scales of layers."""

        def table(present: bool) -> VocabTable | None:
            return VocabTable(place, spec.vocab_size, spec.hidden_size) if present else None

        first, last = self.ranks.first, self.ranks.last
        self.embed = table(first or (last and spec.tied))
        self.layers = nn.ModuleList(DecoderLayer(spec, i, place, held) for i in self.numbers)
        self.norm = Norm(place, spec.hidden_size, spec.norm_eps, spec.norm_plus_one) if last else None
        self.head = self.embed if last and spec.tied else table(last)
        self.ropes = nn.ModuleList(Rope(rope, max_model_len, place.device) for rope in spec.ropes)
        # Rounded to the dtype, as the families that scale embeddings were trained.
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=place.dtype, device=place.device)

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        batch: AttentionBatch,
        caches: list[Tensor],
        embedded: Embedded | None = None,
        hidden_TD: Tensor | None = None,
    ) -> Tensor:
        """Run one step: write its keys and values to the caches, return the hidden states, (T, D), normalised.

        A stage of a pipeline before the last returns its residual stream instead, (T, D) float32, which the next one
        takes as `hidden_TD`; of the token ids that one needs no more than their number.
        """
        x_TD = self._embed(token_ids_T, embedded) if hidden_TD is None else hidden_TD.to(self.place.dtype)
        angles = [rope(positions_T) for rope in self.ropes]
        measure, self.measures_scales = self.measures_scales, False
        residual_TD: Tensor | None = None
        batches = [batch.of_group(group) for group in range(self.layout.width)]
        ropes = [self.spec.layer_rope[i] for i in self.numbers]
        for layer, cache, rope, group in zip(self.layers, caches, ropes, self._layer_group, strict=True):
            x_TD, residual_TD = layer(x_TD, residual_TD, angles[rope], batches[group], cache, measure)
        if measure:
            log.info("scales of keys and values: %s", self.kv_scales())
        x_TD, _ = _add_norm(self.norm, x_TD, residual_TD)
        return x_TD if self.ranks.last else x_TD.float()

    def _embed(self, token_ids_T: Tensor, embedded: Embedded | None) -> Tensor:
        assert self.embed is not None, "of the first stage"
        x_TD = self.embed.embed(token_ids_T)
        if embedded is not None and not self.spec.embedded_scaled:
            x_TD[embedded.at_N] = embedded.rows_ND.to(x_TD)
        if self.spec.embedding_scale != 1.0:
            x_TD = x_TD * self.embedding_scale
        if embedded is not None and self.spec.embedded_scaled:
            x_TD[embedded.at_N] = embedded.rows_ND.to(x_TD)
        return x_TD

    @property
    def routed(self) -> dict[int, Tensor]:
        """For each layer with experts, those of the last step's tokens, (T, K) int64 (see `rayllm.model.moe`)."""
        blocks = {i: layer.mlp for i, layer in zip(self.numbers, self.layers, strict=True)}
        return {i: block.routed for i, block in blocks.items() if isinstance(block, Moe) and block.routed is not None}

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits over the whole vocabulary, (R, V) float32, with the model's own scale and cap."""
        assert self.head is not None, "of the last stage"
        logits_RV = self.head.project(hidden_RD).float()
        if self.spec.logits_scale != 1.0:
            logits_RV = logits_RV / self.spec.logits_scale
        if self.spec.final_soft_cap is not None:
            logits_RV = torch.tanh(logits_RV / self.spec.final_soft_cap) * self.spec.final_soft_cap
        return logits_RV

    def likeliest(self, hidden_RD: Tensor) -> Tensor:
        """The likeliest token of each row, (R) int64."""
        return self.logits(hidden_RD).argmax(dim=-1)

    def cache_specs(self) -> list[CacheSpec]:
        """What each layer caches, on this rank."""
        return [
            CacheSpec(
                kind="full" if layer.attention.window is None else "sliding",
                window=layer.attention.window,
                kv_heads=layer.attention.kv_heads,
                head_size=self.spec.head_size,
                value_in_key=self.spec.mla.kv_lora_rank if self.spec.mla is not None else 0,
                dtype=self._kv_cache.of_layer(i, layer.attention.window, str(self.place.dtype).removeprefix("torch.")),
            )
            for i, layer in zip(self.numbers, self.layers, strict=True)
        ]

    def kv_scales(self) -> list[tuple[float, float]]:
        """By what each layer divides keys and values, if its cache has scales of a layer."""
        return [tuple(layer.attention.kv_scales_2.tolist()) for layer in self.layers]

    def cache_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over all layers of a group, on this rank."""
        specs = self.cache_specs()
        return sum(specs[layer].bytes_per_token for layer in self.layout.largest(len(specs))) * block_size

    def new_caches(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """Empty caches, one for each layer (groups of layers share them), to be handed to `forward`."""
        specs = self.cache_specs()
        caches = []
        for layer in self.layout.largest(len(specs)):
            spec = specs[layer]
            dtype, ops = DTYPES[spec.dtype], self.place.ops
            if spec.value_in_key:
                shape = ops.latent_cache_shape(num_blocks, block_size, spec.head_size, dtype)
            else:
                shape = ops.kv_cache_shape(num_blocks, block_size, spec.kv_heads, spec.head_size, dtype)
            caches.append(zeros(shape, dtype, self.place.device))
        return [caches[index] for _, index in self.layout.places(len(specs))]


class DecoderLayer(nn.Module):
    """Attention, and an MLP or experts, each added to the residual stream."""

    def __init__(self, spec: DecoderSpec, index: int, place: Placement, held: HeldOf | None = None) -> None:
        super().__init__()

        def norm(present: bool) -> Norm | None:
            return Norm(place, spec.hidden_size, spec.norm_eps, spec.norm_plus_one) if present else None

        before, after = spec.norm_placement != "post", spec.norm_placement != "pre"
        self.residual_scale = spec.residual_scale
        self.input_norm = norm(before)
        self.attention = Attention(spec, index, place) if spec.mla is None else LatentAttention(spec, spec.mla, place)
        self.post_attention_norm = norm(after)
        self.mlp_norm = norm(before)
        self.mlp = _mlp(spec, index, place, held)
        self.post_mlp_norm = norm(after)

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        cos_sin_TR: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        measure: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(what is yet to be added, residual stream) to the same; the next norm adds them."""
        x_TD, residual_TD = _add_norm(self.input_norm, x_TD, residual_TD)
        x_TD = self._scaled(self.post_attention_norm, self.attention(x_TD, cos_sin_TR, batch, cache, measure))
        x_TD, residual_TD = _add_norm(self.mlp_norm, x_TD, residual_TD)
        return self._scaled(self.post_mlp_norm, self.mlp(x_TD)), residual_TD

    def _scaled(self, norm: Norm | None, x_TD: Tensor) -> Tensor:
        x_TD = x_TD if norm is None else norm(x_TD)
        return x_TD if self.residual_scale == 1.0 else x_TD * self.residual_scale


class Attention(nn.Module):
    """Grouped-query attention of one layer, whose heads ranks divide (see `split_heads`)."""

    def __init__(self, spec: DecoderSpec, index: int, place: Placement) -> None:
        super().__init__()
        self.ops, self.group = place.ops, place.group
        self.window, self.scale, self.soft_cap = spec.windows[index], spec.query_scale, spec.attention_soft_cap
        self.head_size, width = spec.head_size, spec.num_heads * spec.head_size
        queries, keys = split_heads(spec.num_heads, spec.num_kv_heads, spec.head_size, place.group)
        self.heads, self.kv_heads = queries.rows // spec.head_size, keys.rows // spec.head_size
        self.owns_keys = keys.owned
        self.qkv = ColumnLinear(place, spec.hidden_size, {"q": queries, "k": keys, "v": keys}, spec.qkv_bias)
        self.out = RowLinear(place, width, spec.hidden_size, spec.out_bias, queries)
        part = Part(spec.num_heads, queries.start // spec.head_size, self.heads)
        self.sinks = Sinks(place, part) if spec.sinks else None
        self.qk_norm = spec.qk_norm
        norms: list[Norm | SplitNorm | None] = [None, None]
        if spec.qk_norm == "head":
            norms = [Norm(place, spec.head_size, spec.norm_eps, spec.norm_plus_one) for _ in range(2)]
        elif spec.qk_norm == "all":
            norms = [SplitNorm(place, part, spec.norm_eps, spec.norm_plus_one) for part in (queries, keys)]
        self.q_norm, self.k_norm = norms
        self.register_buffer("kv_scales_2", torch.ones(2, device=place.device))
        """float32, of keys and of values."""

    def forward(
        self, x_TD: Tensor, cos_sin_TR: Tensor, batch: AttentionBatch, cache: Tensor, measure: bool = False
    ) -> Tensor:
        """Attention over the cache, which then holds the step's keys and values; `measure` sets its scales by these."""
        q, k, v = self.qkv(x_TD).split(self.qkv.sizes, dim=-1)
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q_TNH, k_TGH, v_TGH = (part.unflatten(-1, (-1, self.head_size)) for part in (q, k, v))
        if self.qk_norm == "head":
            q_TNH, k_TGH = self.q_norm(q_TNH), self.k_norm(k_TGH)
        q_TNH, k_TGH = self.ops.rotary(q_TNH, k_TGH, cos_sin_TR)
        scaled = cache.dtype in storage.LAYER_SCALED
        if scaled and measure:
            self.kv_scales_2.copy_(of_all_ranks(storage.layer_scales(k_TGH, v_TGH, cache.dtype), self.group))
        scales_2 = self.kv_scales_2 if scaled else None
        self.ops.write_kv(k_TGH, v_TGH, cache, batch.slot_mapping, scales_2)
        out_TNH = self.ops.paged_attention(
            q_TNH, cache, batch, self.scale, self.window, self.soft_cap,
            None if self.sinks is None else self.sinks.weight, scales_2=scales_2,
        )  # fmt: skip
        return self.out(out_TNH.flatten(1))


class Mlp(nn.Module):
    """Gated MLP; ranks divide the inner width."""

    def __init__(self, spec: DecoderSpec, place: Placement, size: int) -> None:
        """`size` is the inner width."""
        super().__init__()
        inner = split_inner(size, place.group)
        self.gate_up = ColumnLinear(place, spec.hidden_size, {"gate": inner, "up": inner}, spec.mlp_bias)
        self.down = RowLinear(place, size, spec.hidden_size, spec.mlp_bias, inner)
        self.activate = place.ops.silu_and_mul if spec.activation == "silu" else place.ops.gelu_tanh_and_mul

    @property
    def inner_rows(self) -> int:
        """Inner width on this rank."""
        return self.down.columns.rows

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down(self.activate(self.gate_up(x_TD)))


def _mlp(spec: DecoderSpec, index: int, place: Placement, held: HeldOf | None) -> Mlp | Moe:
    """What follows the attention of a layer."""
    if spec.moe is None or not spec.has_experts(index):
        return Mlp(spec, place, spec.intermediate_size)
    shared = Mlp(spec, place, spec.moe.shared_size) if spec.moe.shared_size else None
    return Moe(spec.moe, spec.hidden_size, place, shared, None if held is None else held(index))


def _add_norm(norm: Norm | None, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum); without a residual the sum is x, without a norm both are the sum."""
    if residual_TD is None:
        return (x_TD if norm is None else norm(x_TD)), x_TD
    if norm is None:
        sum_TD = residual_TD + x_TD
        return sum_TD, sum_TD
    return norm.add(x_TD, residual_TD)


def of_all_ranks(scales_2: Tensor, group: Group) -> Tensor:
    """The scales of a layer's cache, by what each rank measured of its heads."""
    return group.all_gather(scales_2, dim=0).view(-1, 2).amax(dim=0)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on a CPU take memory only when written: a large pool must not delay the start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
