"""The paged KV cache of one layer and attention over it, in plain torch. Docstrings are the contracts of all versions.

Latent attention has a cache of its own form: a vector for each token, which is the key of all heads, and whose last
entries are the value of all heads (DeepSeek-AI, 2024).

Letters of shapes: T tokens, B requests, N query heads, G key/value heads, R = N / G, H head size, L cache tokens,
K blocks, S tokens of a block, C size of a cached vector of latent attention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rayllm_kernels.batch import AttentionBatch, SingleGroup
from rayllm_kernels.storage import LARGEST, entries, narrowed, widened

QUERY_CHUNK = 128
"""Queries of one request handled at once: bounds the score matrix, and skips most of what causality hides."""


def kv_cache_shape(
    num_blocks: int, block_size: int, kv_heads: int, head_size: int, dtype: torch.dtype = torch.float32
) -> tuple[int, ...]:
    """Shape of one layer's cache of `dtype`, keys and values together. Callers know nothing about it but its size."""
    return (2, num_blocks, block_size, kv_heads, entries(head_size, dtype))


def write_kv(
    k_TGH: Tensor, v_TGH: Tensor, cache: Tensor, slot_mapping_T: Tensor, scales_2: Tensor | None = None
) -> None:
    """Store the keys and values of the step's tokens at their slots; slots are distinct.

    They are rounded to the cache's dtype (see `storage`). `scales_2` are those of keys and of values, by which they are
    divided first, where the dtype has scales of a layer; `None` is 1.
    """
    for part, x_TGH, scale in zip(cache, (k_TGH, v_TGH), _each(scales_2), strict=True):
        _store(x_TGH, part, slot_mapping_T, scale)


def _store(x_TGH: Tensor, part: Tensor, slot_mapping_T: Tensor, scale: Tensor | None) -> None:
    _bytes(part.flatten(0, 1)).index_copy_(0, slot_mapping_T, _bytes(narrowed(x_TGH, part.dtype, scale)))


def _each(scales_2: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Scales of keys and of values."""
    return (None, None) if scales_2 is None else (scales_2[0], scales_2[1])


def _bytes(part: Tensor) -> Tensor:
    """Numbers of eight bits as integers, which can be moved about."""
    return part.view(torch.uint8) if part.dtype in LARGEST else part


def paged_attention(
    q_TNH: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: Tensor | None = None,
    scales_2: Tensor | None = None,
) -> Tensor:
    """Causal attention of each token over the cache of its request, (T, N, H) in the dtype of q.

    Scores are q @ k * scale, then soft_cap * tanh(score / soft_cap) if a cap is given. With a window a token sees
    itself and the window - 1 tokens before it. A sink is one more score of its query head, neither scaled nor capped,
    without a value: it joins the softmax's denominator and nothing else (learned, as in GPT-OSS; Xiao et al., 2024).
    The step's keys and values are in the cache already; what else it holds beyond a request's tokens, NaN included,
    changes nothing. Keys and values count as what was stored of them, times the scales that they were written with.
    Scores and sums are float32. A row's result depends on no other row, but for rounding.
    """
    sinks_GR = None if sinks_N is None else sinks_N.float().view(cache.shape[3], -1)
    return _attend(q_TNH, _Stored(cache, scales_2), batch, _Softmax(scale, soft_cap, sinks_GR), window)


def latent_cache_shape(
    num_blocks: int, block_size: int, size: int, dtype: torch.dtype = torch.float32
) -> tuple[int, ...]:
    """Shape of one layer's cache of `dtype` for latent attention, of vectors of `size`."""
    return (num_blocks, block_size, 1, entries(size, dtype))


def write_latent(x_TC: Tensor, cache: Tensor, slot_mapping_T: Tensor, scales_2: Tensor | None = None) -> None:
    """Store the vectors of the step's tokens at their slots, as `write_kv` stores keys: by the first of the scales."""
    _store(x_TC.unsqueeze(1), cache, slot_mapping_T, _each(scales_2)[0])


def latent_attention(
    q_TNC: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    value_size: int,
    scales_2: Tensor | None = None,
) -> Tensor:
    """Causal attention of each token over the vectors of its request, (T, N, `value_size`) in the dtype of q.

    Scores are q @ vector * scale; values are the last `value_size` entries of the same vectors. All else is as
    `paged_attention` has it.
    """
    return _attend(q_TNC, _Latent(cache, scales_2, value_size), batch, _Softmax(scale, None, None), None)


def _attend(q_TNH: Tensor, stored: "_Stored", batch: AttentionBatch, softmax: "_Softmax", window: int | None) -> Tensor:
    out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], stored.value_size or q_TNH.shape[2])
    for group in batch.singles:
        out_TNH[group.tokens] = _attend_singles(q_TNH, stored, batch, group, softmax, window)
    for row in batch.longer:
        _attend_one(q_TNH, stored, batch, row, softmax, window, out_TNH)
    return out_TNH


@dataclass(frozen=True, slots=True)
class _Stored:
    """A cache and its scales."""

    cache: Tensor
    scales_2: Tensor | None
    value_size: int = 0
    """Entries of a value, if these are not as many as a key's."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.cache.shape[-3]

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.cache.shape[-2]

    def blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks, float32, in the shape of `blocks` and then (S, G, H)."""
        keys, values = (
            widened(_bytes(part)[blocks].view(self.cache.dtype), scale)
            for part, scale in zip(self.cache, _each(self.scales_2), strict=True)
        )
        return keys, values


@dataclass(frozen=True, slots=True)
class _Latent(_Stored):
    """A cache of latent attention."""

    def blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """See `_Stored`."""
        keys = widened(_bytes(self.cache)[blocks].view(self.cache.dtype), _each(self.scales_2)[0])
        return keys, keys[..., -self.value_size :]


@dataclass(frozen=True, slots=True)
class _Softmax:
    """From products of queries and keys to weights."""

    scale: float
    soft_cap: float | None
    sinks_GR: Tensor | None
    """float32."""

    def weights(self, scores_GRQL: Tensor, hidden: Tensor) -> Tensor:
        """In the shape of the scores; any dimensions may stand before G. `hidden` is broadcast to them."""
        scores = scores_GRQL * self.scale
        if self.soft_cap is not None:
            scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks_GR is None:
            return scores.softmax(-1)
        sinks = self.sinks_GR[..., None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]


def _attend_singles(
    q_TNH: Tensor,
    stored: _Stored,
    batch: AttentionBatch,
    group: SingleGroup,
    softmax: _Softmax,
    window: int | None,
) -> Tensor:
    """Attention of requests with one query each, padded to the longest: (B, N, H)."""
    block_size, kv_heads = stored.block_size, stored.kv_heads
    seq_lens_B1 = batch.seq_lens[group.rows].unsqueeze(1).long()
    num_blocks = -(-group.max_seq_len // block_size)
    columns_1K = torch.arange(num_blocks, device=q_TNH.device).unsqueeze(0)
    if window is not None:
        # A window that does not start on a block reaches into one block more than it fills.
        columns_1K = columns_1K[:, : -(-window // block_size) + 1]
        columns_1K = (seq_lens_B1 - window).clamp(min=0) // block_size + columns_1K
    table_BK = batch.block_table[group.rows]
    blocks_BK = table_BK.gather(1, columns_1K.expand(len(table_BK), -1).clamp(max=table_BK.shape[1] - 1))
    position_BL = (columns_1K.unsqueeze(2) * block_size + torch.arange(block_size, device=q_TNH.device)).flatten(1)
    hidden_BL = position_BL >= seq_lens_B1
    if window is not None:
        hidden_BL = hidden_BL | (position_BL < seq_lens_B1 - window)

    keys_BLGH, values_BLGH = (part.flatten(1, 2) for part in stored.blocks(blocks_BK))
    # Their weight is 0, but 0 times NaN is NaN, and a block may hold what a request before left there.
    values_BLGH.masked_fill_(hidden_BL[:, :, None, None], 0.0)
    q_BGRH = q_TNH[group.tokens].float().unflatten(1, (kv_heads, -1))
    scores_BGRL = torch.einsum("bgrh,blgh->bgrl", q_BGRH, keys_BLGH)
    weights_BGRL = softmax.weights(scores_BGRL.unsqueeze(3), hidden_BL[:, None, None, None]).squeeze(3)
    out_BGRH = torch.einsum("bgrl,blgh->bgrh", weights_BGRL, values_BLGH)
    return out_BGRH.flatten(1, 2).to(q_TNH.dtype)


def _attend_one(
    q_TNH: Tensor,
    stored: _Stored,
    batch: AttentionBatch,
    row: int,
    softmax: _Softmax,
    window: int | None,
    out_TNH: Tensor,
) -> None:
    """Attention of one request with several queries, written to its rows of `out_TNH`."""
    block_size, kv_heads = stored.block_size, stored.kv_heads
    first, last = int(batch.query_start_host[row]), int(batch.query_start_host[row + 1])
    seq_len = int(batch.seq_lens_host[row])
    shift = seq_len - last  # position of a token = its place in the step + shift
    oldest = 0 if window is None else max(0, first + shift - window + 1)
    base = oldest // block_size * block_size
    blocks_K = batch.block_table[row, base // block_size : -(-seq_len // block_size)]
    keys_GLH, values_GLH = (part.flatten(0, 1).transpose(0, 1).contiguous() for part in stored.blocks(blocks_K))
    for start in range(first, last, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, last)
        begin = base if window is None else max(base, start + shift - window + 1)
        seen = slice(begin - base, end + shift - base)
        query_Q1 = torch.arange(start + shift, end + shift, device=q_TNH.device).unsqueeze(1)
        key_1L = torch.arange(begin, end + shift, device=q_TNH.device).unsqueeze(0)
        hidden_QL = key_1L > query_Q1
        if window is not None:
            hidden_QL = hidden_QL | (key_1L <= query_Q1 - window)
        q_GRQH = q_TNH[start:end].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        scores_GML = q_GRQH.flatten(1, 2) @ keys_GLH[:, seen].transpose(1, 2)
        scores_GRQL = scores_GML.unflatten(1, (-1, end - start))
        weights_GML = softmax.weights(scores_GRQL, hidden_QL).flatten(1, 2)
        out_GMH = weights_GML @ values_GLH[:, seen]
        out_QGRH = out_GMH.unflatten(1, (-1, end - start)).permute(2, 0, 1, 3)
        out_TNH[start:end] = out_QGRH.flatten(1, 2).to(q_TNH.dtype)
