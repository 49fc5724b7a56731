"""The paged KV cache of one layer and attention over it, in plain torch. Docstrings are the contracts of all versions.

Letters of shapes: T tokens, B requests, N query heads, G key/value heads, R = N / G, H head size, L cache tokens,
K blocks, S tokens of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rayllm_kernels.batch import AttentionBatch, SingleGroup

QUERY_CHUNK = 128
"""Queries of one request handled at once: bounds the score matrix, and skips most of what causality hides."""


def kv_cache_shape(num_blocks: int, block_size: int, kv_heads: int, head_size: int) -> tuple[int, ...]:
    """Shape of one layer's cache, keys and values together. Callers know nothing about it but its size."""
    return (2, num_blocks, block_size, kv_heads, head_size)


def write_kv(k_TGH: Tensor, v_TGH: Tensor, cache: Tensor, slot_mapping_T: Tensor) -> None:
    """Store the keys and values of the step's tokens at their slots; slots are distinct."""
    keys, values = cache.view(2, -1, *cache.shape[3:])
    keys.index_copy_(0, slot_mapping_T, k_TGH)
    values.index_copy_(0, slot_mapping_T, v_TGH)


def paged_attention(
    q_TNH: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Causal attention of each token over the cache of its request, (T, N, H) in the dtype of q.

    Scores are q @ k * scale, then soft_cap * tanh(score / soft_cap) if a cap is given. With a window a token sees
    itself and the window - 1 tokens before it. A sink is one more score of its query head, neither scaled nor capped,
    without a value: it joins the softmax's denominator and nothing else (learned, as in GPT-OSS; Xiao et al., 2024).
    The step's keys and values are in the cache already; what else it holds beyond a request's tokens, NaN included,
    changes nothing. Scores and sums are float32. A row's result depends on no other row, but for rounding.
    """
    sinks_GR = None if sinks_N is None else sinks_N.float().view(cache.shape[3], -1)
    softmax = _Softmax(scale, soft_cap, sinks_GR)
    out_TNH = torch.empty_like(q_TNH)
    for group in batch.singles:
        out_TNH[group.tokens] = _attend_singles(q_TNH, cache, batch, group, softmax, window)
    for row in batch.longer:
        _attend_one(q_TNH, cache, batch, row, softmax, window, out_TNH)
    return out_TNH


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
    cache: Tensor,
    batch: AttentionBatch,
    group: SingleGroup,
    softmax: _Softmax,
    window: int | None,
) -> Tensor:
    """Attention of requests with one query each, padded to the longest: (B, N, H)."""
    block_size, kv_heads, head_size = cache.shape[2:]
    seq_lens_B1 = batch.seq_lens[group.rows].unsqueeze(1).long()
    num_blocks = -(-group.max_seq_len // block_size)
    columns_1K = torch.arange(num_blocks, device=cache.device).unsqueeze(0)
    if window is not None:
        # A window that does not start on a block reaches into one block more than it fills.
        columns_1K = columns_1K[:, : -(-window // block_size) + 1]
        columns_1K = (seq_lens_B1 - window).clamp(min=0) // block_size + columns_1K
    table_BK = batch.block_table[group.rows]
    blocks_BK = table_BK.gather(1, columns_1K.expand(len(table_BK), -1).clamp(max=table_BK.shape[1] - 1))
    position_BL = (columns_1K.unsqueeze(2) * block_size + torch.arange(block_size, device=cache.device)).flatten(1)
    hidden_BL = position_BL >= seq_lens_B1
    if window is not None:
        hidden_BL = hidden_BL | (position_BL < seq_lens_B1 - window)

    keys_BLGH, values_BLGH = (part[blocks_BK].flatten(1, 2).float() for part in cache)
    # Their weight is 0, but 0 times NaN is NaN, and a block may hold what a request before left there.
    values_BLGH.masked_fill_(hidden_BL[:, :, None, None], 0.0)
    q_BGRH = q_TNH[group.tokens].float().unflatten(1, (kv_heads, -1))
    scores_BGRL = torch.einsum("bgrh,blgh->bgrl", q_BGRH, keys_BLGH)
    weights_BGRL = softmax.weights(scores_BGRL.unsqueeze(3), hidden_BL[:, None, None, None]).squeeze(3)
    out_BGRH = torch.einsum("bgrl,blgh->bgrh", weights_BGRL, values_BLGH)
    return out_BGRH.reshape(len(table_BK), -1, head_size).to(q_TNH.dtype)


def _attend_one(
    q_TNH: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    row: int,
    softmax: _Softmax,
    window: int | None,
    out_TNH: Tensor,
) -> None:
    """Attention of one request with several queries, written to its rows of `out_TNH`."""
    block_size, kv_heads, head_size = cache.shape[2:]
    first, last = int(batch.query_start_host[row]), int(batch.query_start_host[row + 1])
    seq_len = int(batch.seq_lens_host[row])
    shift = seq_len - last  # position of a token = its place in the step + shift
    oldest = 0 if window is None else max(0, first + shift - window + 1)
    base = oldest // block_size * block_size
    blocks_K = batch.block_table[row, base // block_size : -(-seq_len // block_size)]
    keys_GLH, values_GLH = (part[blocks_K].flatten(0, 1).transpose(0, 1).float().contiguous() for part in cache)
    for start in range(first, last, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, last)
        begin = base if window is None else max(base, start + shift - window + 1)
        seen = slice(begin - base, end + shift - base)
        query_Q1 = torch.arange(start + shift, end + shift, device=cache.device).unsqueeze(1)
        key_1L = torch.arange(begin, end + shift, device=cache.device).unsqueeze(0)
        hidden_QL = key_1L > query_Q1
        if window is not None:
            hidden_QL = hidden_QL | (key_1L <= query_Q1 - window)
        q_GRQH = q_TNH[start:end].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        scores_GML = q_GRQH.flatten(1, 2) @ keys_GLH[:, seen].transpose(1, 2)
        scores_GRQL = scores_GML.unflatten(1, (-1, end - start))
        weights_GML = softmax.weights(scores_GRQL, hidden_QL).flatten(1, 2)
        out_GMH = weights_GML @ values_GLH[:, seen]
        out_QGRH = out_GMH.unflatten(1, (-1, end - start)).permute(2, 0, 1, 3)
        out_TNH[start:end] = out_QGRH.reshape(end - start, -1, head_size).to(q_TNH.dtype)
