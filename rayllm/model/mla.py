"""Multi-head latent attention (MLA; DeepSeek-AI, 2024) over its compressed cache.

Keys and values are never computed head by head. A head's query is projected into the space of the latent vectors, and
compared with these as they are cached; the same vectors, weighted, then go through the head's projection of values:

    q . (K_h c) = (K_h' q) . c          sum_t w_t (V_h c_t) = V_h sum_t w_t c_t

Letters of shapes: T tokens of a step, D width, N heads on this rank, R rotated entries, P other entries of a head's
query, L latent entries, C = R + L size of what is cached, V size of a head's value.
"""

import torch
from torch import Tensor, nn

from rayllm.model.layers import ColumnLinear, Norm, Part, Placement, RowLinear, Stored, split_evenly
from rayllm.model.spec import DecoderSpec, MlaSpec
from rayllm_kernels import AttentionBatch, storage


class LatentAttention(nn.Module):
    """Latent attention of one layer; ranks divide the heads, and each has the whole cache."""

    kv_heads = 1
    """Of the cache."""
    owns_keys = True
    window = None

    def __init__(self, spec: DecoderSpec, mla: MlaSpec, place: Placement) -> None:
        super().__init__()
        self.ops, self.mla, self.scale = place.ops, mla, spec.query_scale
        rotated, latent, width = mla.qk_rope_head_dim, mla.kv_lora_rank, spec.hidden_size

        own = split_evenly(spec.num_heads, place.group)
        self.heads = own.rows

        def per_head(size: int) -> Part:
            return Part(own.full * size, own.start * size, own.rows * size)

        self.q_a: ColumnLinear | None = None
        self.q_a_norm: Norm | None = None
        if mla.q_lora_rank is not None:
            down = Part(mla.q_lora_rank, 0, mla.q_lora_rank)
            self.q_a = ColumnLinear(place, width, {"q": down}, spec.qkv_bias)
            self.q_a_norm = Norm(place, mla.q_lora_rank, mla.norm_eps, plus_one=False)
            width = mla.q_lora_rank
        queries = per_head(mla.qk_nope_head_dim + rotated)
        self.q = RotatedFirst(place, width, queries, False, mla, mla.qk_nope_head_dim)
        self.kv_a = RotatedFirst(
            place, spec.hidden_size, Part(latent + rotated, 0, latent + rotated), spec.qkv_bias, mla, latent
        )
        self.kv_a_norm = Norm(place, latent, mla.norm_eps, plus_one=False)
        self.kv_b = ColumnLinear(place, latent, {"kv": per_head(mla.qk_nope_head_dim + mla.v_head_dim)}, bias=False)
        values = per_head(mla.v_head_dim)
        self.out = RowLinear(place, values.full, spec.hidden_size, spec.out_bias, values)
        self.register_buffer("kv_scales_2", torch.ones(2, device=place.device))
        """float32; the first is of the cached vectors, the second is not used."""

    def forward(
        self, x_TD: Tensor, cos_sin_TR: Tensor, batch: AttentionBatch, cache: Tensor, measure: bool = False
    ) -> Tensor:
        """Attention over the cache, which then holds the step's tokens; `measure` sets its scale by these."""
        mla = self.mla
        low_TD = x_TD
        if self.q_a is not None and self.q_a_norm is not None:
            low_TD = self.q_a_norm(self.q_a(x_TD))
        rotated_TNR, rest_TNP = (
            self.q(low_TD).unflatten(-1, (self.heads, -1)).split((mla.qk_rope_head_dim, mla.qk_nope_head_dim), dim=-1)
        )
        key_TR, latent_TL = self.kv_a(x_TD).split((mla.qk_rope_head_dim, mla.kv_lora_rank), dim=-1)
        rotated_TNR, key_T1R = self.ops.rotary(rotated_TNR, key_TR.unsqueeze(1), cos_sin_TR)
        cached_TC = torch.cat((key_T1R.squeeze(1), self.kv_a_norm(latent_TL)), dim=-1)
        to_key_NPL, to_value_NVL = self.projections()
        q_TNC = torch.cat((rotated_TNR, torch.einsum("tnp,npl->tnl", rest_TNP, to_key_NPL)), dim=-1)
        scaled = cache.dtype in storage.LAYER_SCALED
        if scaled and measure:
            self.kv_scales_2.copy_(storage.layer_scales(cached_TC, cached_TC, cache.dtype))
        scales_2 = self.kv_scales_2 if scaled else None
        self.ops.write_latent(cached_TC, cache, batch.slot_mapping, scales_2)
        out_TNL = self.ops.latent_attention(q_TNC, cache, batch, self.scale, mla.kv_lora_rank, scales_2)
        return self.out(torch.einsum("tnl,nvl->tnv", out_TNL, to_value_NVL).flatten(1))

    def projections(self) -> tuple[Tensor, Tensor]:
        """Of each head, from the latent vector: to the part of its key that is not rotated, (N, P, L); to its value."""
        both = self.kv_b.weight.view(self.heads, -1, self.mla.kv_lora_rank)
        to_key, to_value = both.split((self.mla.qk_nope_head_dim, self.mla.v_head_dim), dim=1)
        return to_key, to_value


class RotatedFirst(ColumnLinear):
    """Linear layer to heads whose last entries are rotated: here these come first, the halves of a pair far apart."""

    def __init__(self, place: Placement, in_size: int, part: Part, bias: bool, mla: MlaSpec, kept: int) -> None:
        """`kept` entries of a head are not rotated."""
        super().__init__(place, in_size, {"": part}, bias)
        self._kept, self._rotated = kept, mla.qk_rope_head_dim
        self._interleaved = mla.interleaved

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        super().fill(kind, parts, stored)
        filled = getattr(self, kind)
        kept, rotated = filled.unflatten(0, (-1, self._kept + self._rotated)).split((self._kept, self._rotated), dim=1)
        if self._interleaved:
            rotated = rotated.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        filled.copy_(torch.cat((rotated, kept), dim=1).flatten(0, 1))
