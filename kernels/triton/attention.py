"""Paged attention for GPUs, after FlashAttention-2 (Dao, 2023) and Flash-Decoding.

A context is cut into splits of SPLIT tokens, counted from its beginning. The softmax of a split is formed block by
block; then splits are folded together in order. One program does all splits of ROWS rows (a row is one query of one
head; heads that share keys stand together), or, where requests have one query and long contexts, one program does one
split and `join_kernel` folds. Both fold with the same arithmetic, and a split or block that a row does not see leaves
its numbers as they are, so a row's result depends neither on the batch nor on how its request was cut into chunks.

Letters of shapes: M rows of a program, L tokens of a block, H head size (filled up to a power of two).
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rayllm_kernels.batch import AttentionBatch

SPLIT = 512
ROWS = 64
TOKENS = 32


@triton.jit
def write_kernel(
    k, v, keys, values, slots, k_stride, k_head, v_stride, v_head, heads, head_size, BLOCK_H: tl.constexpr
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.arange(0, BLOCK_H)
    inside = entry < head_size
    to = (tl.load(slots + token) * heads + head) * head_size + entry
    tl.store(keys + to, tl.load(k + token * k_stride + head * k_head + entry, inside, 0.0), inside)
    tl.store(values + to, tl.load(v + token * v_stride + head * v_head + entry, inside, 0.0), inside)


@triton.jit
def fold(top, total, acc, part_top, part_total, part):
    """Fold a split into those before it; what nobody has seen has a top of -inf."""
    most = tl.maximum(top, part_top)
    safe = tl.where(most == float("-inf"), 0.0, most)
    old, fresh = tl.exp(top - safe), tl.exp(part_top - safe)
    return most, total * old + part_total * fresh, acc * old[:, None] + part * fresh[:, None]


@triton.jit
def finish(top, total, acc, sink):
    """Divide by the sum, which the sink (or -inf) joins last."""
    most = tl.maximum(top, sink)
    safe = tl.where(most == float("-inf"), 0.0, most)
    old = tl.exp(top - safe)
    total = total * old + tl.exp(sink - safe)
    return acc * (old / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def one_split(
    q_MH, position_M, keys, values, table, begin, end, group, groups, head_size, block_size, scale, window, cap,
    CAP: tl.constexpr, L: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Softmax of the tokens from `begin` to `end`, begin a multiple of L: maxima, sums, weighted values."""
    entry = tl.arange(0, BLOCK_H)
    token = tl.arange(0, L)
    top = tl.full([q_MH.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q_MH.shape[0]], tl.float32)
    acc = tl.zeros([q_MH.shape[0], BLOCK_H], tl.float32)
    for start in range(begin, end, L):
        at = start + token
        there = at < end
        block = tl.load(table + at // block_size, there, 0).to(tl.int64)
        row = ((block * block_size + at % block_size) * groups + group) * head_size
        # Zeros where there is no token: 0 times what a block holds beyond could be NaN.
        whole = there[:, None] & (entry < head_size)[None, :]
        k_LH = tl.load(keys + row[:, None] + entry[None, :], whole, 0.0)
        v_LH = tl.load(values + row[:, None] + entry[None, :], whole, 0.0)
        score = tl.dot(q_MH, tl.trans(k_LH), input_precision="ieee") * scale
        if CAP:
            score = cap * (2.0 * tl.sigmoid(score * (2.0 / cap)) - 1.0)
        seen = there[None, :] & (at[None, :] <= position_M[:, None]) & (at[None, :] > position_M[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        most = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(most == float("-inf"), 0.0, most)
        old, weight = tl.exp(top - safe), tl.exp(score - safe[:, None])
        total = total * old + tl.sum(weight, 1)
        acc = acc * old[:, None] + tl.dot(weight.to(v_LH.dtype), v_LH, input_precision="ieee")
        top = most
    return top, total, acc


@triton.jit
def attention_kernel(
    q, keys, values, table, query_start, seq_lens, sinks, out, parts,
    q_stride, q_head, table_stride, heads, groups, head_size, block_size, splits, scale, window, cap,
    PARTIAL: tl.constexpr, SINGLES: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    M: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of a request's rows or, if PARTIAL, splits; requests; key/value heads.

    PARTIAL takes requests with one query only. SINGLES says whether the other kind takes these too.
    """
    request, group = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_query = tl.load(query_start + request).to(tl.int64)
    queries = tl.load(query_start + request + 1) - first_query
    length = tl.load(seq_lens + request)
    ratio = heads // groups
    tile = 0 if PARTIAL else tl.program_id(0)
    mine = (queries == 1 if PARTIAL else queries > (0 if SINGLES else 1)) & (tile * M < queries * ratio)
    if mine:
        row = tile * M + tl.arange(0, M)
        inside = row < queries * ratio
        query, head = row // ratio, group * ratio + row % ratio
        position = (length - queries + query).to(tl.int32)
        entry = tl.arange(0, BLOCK_H)
        whole = inside[:, None] & (entry < head_size)[None, :]
        at = q + (first_query + query)[:, None] * q_stride + head[:, None] * q_head + entry[None, :]
        q_MH = tl.load(at, whole, 0.0)
        earliest = (length - queries + tile * M // ratio).to(tl.int32)
        last_query = tl.minimum((tile * M + M - 1) // ratio, (queries - 1).to(tl.int32))
        end = (length - queries + last_query + 1).to(tl.int32)
        lowest = tl.maximum(earliest - window + 1, 0) // L * L
        to = (first_query + query) * heads + head
        if PARTIAL:
            split = tl.program_id(0)
            begin = tl.maximum(split * S, lowest)
            top, total, acc = one_split(
                q_MH, position, keys, values, table + request * table_stride, begin, tl.minimum(end, split * S + S),
                group, groups, head_size, block_size, scale, window, cap, CAP, L, BLOCK_H,
            )  # fmt: skip
            part = parts + (to * splits + split) * (head_size + 2)
            tl.store(part, top, inside)
            tl.store(part + 1, total, inside)
            tl.store(part[:, None] + 2 + entry[None, :], acc, whole)
        else:
            top = tl.full([M], float("-inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, BLOCK_H], tl.float32)
            for start in range(lowest // S * S, end, S):
                part_top, part_total, part = one_split(
                    q_MH, position, keys, values, table + request * table_stride, tl.maximum(start, lowest),
                    tl.minimum(end, start + S), group, groups, head_size, block_size, scale, window, cap, CAP, L,
                    BLOCK_H,
                )  # fmt: skip
                top, total, acc = fold(top, total, acc, part_top, part_total, part)
            sink = tl.full([M], float("-inf"), tl.float32)
            if SINKS:
                sink = tl.load(sinks + head, inside, float("-inf")).to(tl.float32)
            result = finish(top, total, acc, sink)
            tl.store(out + (to * head_size)[:, None] + entry[None, :], result.to(q_MH.dtype), whole)


@triton.jit
def join_kernel(
    parts, query_start, seq_lens, sinks, out, heads, head_size, splits, window,
    SINKS: tl.constexpr, S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Grid: requests, query heads. Fold what `attention_kernel` left of requests with one query."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query = tl.load(query_start + request).to(tl.int64)
    if tl.load(query_start + request + 1) - query == 1:
        length = tl.load(seq_lens + request)
        entry = tl.arange(0, BLOCK_H)
        inside = entry < head_size
        row = query * heads + head
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_H], tl.float32)
        for split in range(tl.maximum(length - window, 0) // S, (length + S - 1) // S):
            part = parts + (row * splits + split) * (head_size + 2)
            value = tl.load(part + 2 + entry, inside, 0.0)
            top, total, acc = fold(
                top, total, acc, tl.load(part + tl.arange(0, 1)), tl.load(part + 1 + tl.arange(0, 1)), value[None, :]
            )
        sink = tl.full([1], float("-inf"), tl.float32)
        if SINKS:
            sink = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32)
        result = finish(top, total, acc, sink)
        tl.store(out + row * head_size + entry[None, :], result.to(out.dtype.element_ty), inside[None, :])


def write_kv(
    k_TGH: Tensor, v_TGH: Tensor, cache: Tensor, slot_mapping_T: Tensor, scales_2: Tensor | None = None
) -> None:
    """See `attention.write_kv`; without scales."""
    assert scales_2 is None, "the table offers this for caches in the model's dtype"
    tokens, heads, head_size = k_TGH.shape
    write_kernel[(tokens, heads)](
        k_TGH, v_TGH, cache[0], cache[1], slot_mapping_T, k_TGH.stride(0), k_TGH.stride(1), v_TGH.stride(0),
        v_TGH.stride(1), heads, head_size, BLOCK_H=triton.next_power_of_2(head_size),
    )  # fmt: skip


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
    """See `attention.paged_attention`; without scales. Rows are the same bits in every batch."""
    assert scales_2 is None, "the table offers this for caches in the model's dtype"
    heads, head_size = q_TNH.shape[1:]
    block_size, groups = cache.shape[2:4]
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    counts, longest = np.diff(batch.query_start_host), int(batch.seq_lens_host.max())
    requests, splits = len(counts), triton.cdiv(longest, SPLIT)
    window = window or longest
    partial = splits > 1 and bool((counts == 1).any())
    parts = out_TNH.new_empty(len(q_TNH) * heads * splits * (head_size + 2) if partial else 0, dtype=torch.float32)
    has_sinks, sinks = sinks_N is not None, out_TNH if sinks_N is None else sinks_N
    block_h = max(16, triton.next_power_of_2(head_size))
    warps = 8 if block_h > 128 else 4  # two sets of sums must fit the registers

    def attend(programs: int, partial: bool, singles: bool) -> None:
        attention_kernel[(programs, requests, groups)](
            q_TNH, cache[0], cache[1], batch.block_table, batch.query_start, batch.seq_lens, sinks, out_TNH, parts,
            q_TNH.stride(0), q_TNH.stride(1), batch.block_table.stride(0), heads, groups, head_size, block_size,
            splits, scale, window, soft_cap or 0.0,
            PARTIAL=partial, SINGLES=singles, CAP=soft_cap is not None, SINKS=has_sinks, M=ROWS, L=TOKENS, S=SPLIT,
            BLOCK_H=block_h, num_warps=warps,
        )  # fmt: skip

    if not partial or (counts > 1).any():
        attend(triton.cdiv(int(counts.max()) * heads // groups, ROWS), partial=False, singles=not partial)
    if partial:
        attend(splits, partial=True, singles=True)
        join_kernel[(requests, heads)](
            parts, batch.query_start, batch.seq_lens, sinks, out_TNH, heads, head_size, splits, window,
            SINKS=has_sinks, S=SPLIT, BLOCK_H=block_h,
        )  # fmt: skip
    return out_TNH
