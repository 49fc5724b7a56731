"""Paged attention against its formula, one query and one head at a time, in float64."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from rayllm_kernels import REFERENCE, AttentionBatch, Ops, select
from rayllm_kernels import batch as batch_module

TABLES = {"reference": REFERENCE, "cpu": select("cpu")}
tables = pytest.mark.parametrize("ops", TABLES.values(), ids=TABLES)

MIXED = [(1, 1), (1, 40), (5, 5), (3, 30), (1, 9), (150, 170), (1, 16), (2, 17)]
"""(queries, length) of each request."""


@dataclass
class Case:
    """A step over caches that the operations themselves filled."""

    q_TNH: Tensor
    cache: Tensor
    batch: AttentionBatch
    keys: list[Tensor]
    values: list[Tensor]


def make_case(
    ops: Ops,
    requests: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 10,
    block_size: int = 4,
) -> Case:
    generator = torch.Generator().manual_seed(len(requests))
    rng = np.random.default_rng(1)
    blocks = [-(-length // block_size) for _, length in requests]
    order = rng.permutation(sum(blocks) + 3)
    cache = torch.full(ops.kv_cache_shape(len(order), block_size, kv_heads, head_size), 50.0, dtype=dtype)
    table = np.zeros((len(requests), max(blocks)), dtype=np.int32)
    keys, values, slots, first = [], [], [], 0
    for row, (queries, length) in enumerate(requests):
        own = order[first : first + blocks[row]]
        first += blocks[row]
        table[row, : blocks[row]] = own
        positions = np.arange(length)
        places = own[positions // block_size] * block_size + positions % block_size
        k, v = (torch.randn(length, kv_heads, head_size, generator=generator).to(dtype) for _ in range(2))
        ops.write_kv(k, v, cache, torch.from_numpy(places.astype(np.int64)))
        keys.append(k)
        values.append(v)
        slots.append(places[length - queries :])
    counts = [queries for queries, _ in requests]
    batch = AttentionBatch.from_numpy(
        np.cumsum([0, *counts], dtype=np.int32),
        np.array([length for _, length in requests], dtype=np.int32),
        table,
        np.concatenate(slots),
    )
    q = torch.randn(sum(counts), heads, head_size, generator=generator).to(dtype)
    return Case(q, cache, batch, keys, values)


def naive(case: Case, scale: float, window: int | None, soft_cap: float | None) -> Tensor:
    out = torch.empty(case.q_TNH.shape, dtype=torch.float64)
    starts = case.batch.query_start.tolist()
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        first, last = starts[row], starts[row + 1]
        repeat = case.q_TNH.shape[1] // keys.shape[1]
        for token in range(first, last):
            position = len(keys) - (last - token)
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            for head in range(case.q_TNH.shape[1]):
                scores = keys[seen, head // repeat].double() @ case.q_TNH[token, head].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * (scores / soft_cap).tanh()
                out[token, head] = scores.softmax(0) @ values[seen, head // repeat].double()
    return out


@tables
@pytest.mark.parametrize("window", [None, 1, 4, 7, 1000])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_mixed_batch(ops: Ops, window: int | None, soft_cap: float | None) -> None:
    case = make_case(ops, MIXED)
    out = ops.paged_attention(case.q_TNH, case.cache, case.batch, 0.5, window, soft_cap)
    torch.testing.assert_close(out.double(), naive(case, 0.5, window, soft_cap), atol=1e-5, rtol=1e-5)


@tables
@pytest.mark.parametrize("shape", [(3, 3, 7, 1), (9, 3, 16, 16), (5, 1, 8, 32)], ids=str)
def test_shapes(ops: Ops, shape: tuple[int, int, int, int]) -> None:
    """Heads, key/value heads, head size, block size."""
    case = make_case(ops, MIXED, torch.float32, *shape)
    scale = 1 / math.sqrt(shape[2])
    out = ops.paged_attention(case.q_TNH, case.cache, case.batch, scale)
    torch.testing.assert_close(out.double(), naive(case, scale, None, None), atol=1e-5, rtol=1e-5)


@tables
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(ops: Ops, dtype: torch.dtype) -> None:
    case = make_case(ops, MIXED, dtype)
    out = ops.paged_attention(case.q_TNH, case.cache, case.batch, 0.3, 20)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), naive(case, 0.3, 20, None), atol=1e-2, rtol=1e-2)


@tables
def test_many_groups(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one query in groups of every size, some of one."""
    monkeypatch.setattr(batch_module, "GROUP_TOKENS", 64)
    monkeypatch.setattr(batch_module, "SMALL_TOKENS", 8)
    case = make_case(ops, [(1, length) for length in (70, 3, 65, 1, 20, 21, 2, 2, 9, 33)])
    assert len(case.batch.singles) > 3
    assert sorted(row for group in case.batch.singles for row in group.rows.tolist()) == list(range(10))
    for window in (None, 5):
        out = ops.paged_attention(case.q_TNH, case.cache, case.batch, 0.5, window)
        torch.testing.assert_close(out.double(), naive(case, 0.5, window, None), atol=1e-5, rtol=1e-5)


def test_batch_numbers() -> None:
    case = make_case(REFERENCE, MIXED)
    assert case.batch.longer == (2, 3, 5, 7)
    assert case.batch.slot_mapping.dtype == torch.int64
    assert {case.batch.query_start.dtype, case.batch.seq_lens.dtype, case.batch.block_table.dtype} == {torch.int32}
