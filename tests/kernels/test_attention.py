"""Every version of paged attention against its formula in float64, over caches that the operations filled.

Caches hold NaN wherever nothing was written.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from rayllm_kernels import REFERENCE, AttentionBatch, Ops, SharedPrefix
from rayllm_kernels import batch as batch_module
from rayllm_kernels.native.ops import NativeOps
from rayllm_kernels.storage import HEAD_SCALED, LARGEST, LAYER_SCALED, narrowed, widened
from tests.kernels.conftest import INTERPRETED, native, variants

MIXED = [(1, 1), (1, 40), (5, 5), (3, 30), (1, 9), (150, 170), (1, 16), (2, 17)]
"""(queries, length) of each request."""
LONG = [(1, 700), (3, 512), (1, 257), (70, 300)]
"""Longer than what the softmax is formed of at once."""
tables = pytest.mark.parametrize("ops", ["reference", *variants(), *INTERPRETED], indirect=True)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass
class Case:
    """A step over a cache."""

    q_TNH: Tensor
    cache: Tensor
    batch: AttentionBatch
    keys: list[Tensor]
    values: list[Tensor]
    scales_2: Tensor | None = None


def make_case(
    ops: Ops,
    requests: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 10,
    block_size: int = 4,
    stored: torch.dtype | None = None,
    scales_2: Tensor | None = None,
) -> Case:
    """Keys and values of the case are what the cache, of dtype `stored`, keeps of random ones."""
    stored = stored or dtype
    generator = torch.Generator().manual_seed(len(requests))
    rng = np.random.default_rng(1)
    blocks = [-(-length // block_size) for _, length in requests]
    order = rng.permutation(sum(blocks) + 3)
    cache = torch.empty(ops.kv_cache_shape(len(order), block_size, kv_heads, head_size, stored), dtype=stored)
    cache.view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype, and as a scale
    table = np.zeros((len(requests), max(blocks)), dtype=np.int32)
    keys, values, slots, first = [], [], [], 0
    for row, (queries, length) in enumerate(requests):
        own = order[first : first + blocks[row]]
        first += blocks[row]
        table[row, : blocks[row]] = own
        positions = np.arange(length)
        places = own[positions // block_size] * block_size + positions % block_size
        # As a decoder has them: views of rows that hold more.
        k, v, _ = torch.randn(length, 3 * kv_heads, head_size, generator=generator).to(dtype).chunk(3, dim=1)
        slot_mapping = torch.from_numpy(places.astype(np.int64))
        if scales_2 is None:
            ops.write_kv(k, v, cache, slot_mapping)
        else:
            ops.write_kv(k, v, cache, slot_mapping, scales_2)
        for kept, x, scale in zip((keys, values), (k, v), (None, None) if scales_2 is None else scales_2, strict=True):
            kept.append(widened(narrowed(x, stored, scale), scale))
        slots.append(places[length - queries :])
    counts = [queries for queries, _ in requests]
    batch = AttentionBatch.from_numpy(
        np.cumsum([0, *counts], dtype=np.int32),
        np.array([length for _, length in requests], dtype=np.int32),
        table,
        np.concatenate(slots),
    )
    q = torch.randn(sum(counts), 2 * heads, head_size, generator=generator).to(dtype)[:, :heads]
    return Case(q, cache, batch, keys, values, scales_2)


def naive(
    case: Case, scale: float, window: int | None = None, soft_cap: float | None = None, sinks_N: Tensor | None = None
) -> Tensor:
    out = []
    for (first, last), keys, values in zip(
        pairwise(case.batch.query_start.tolist()), case.keys, case.values, strict=True
    ):
        q_QNH = case.q_TNH[first:last].double()
        k_LNH, v_LNH = (x.double().repeat_interleave(q_QNH.shape[1] // x.shape[1], 1) for x in (keys, values))
        scores_NQL = torch.einsum("qnh,lnh->nql", q_QNH, k_LNH) * scale
        if soft_cap is not None:
            scores_NQL = soft_cap * (scores_NQL / soft_cap).tanh()
        position = torch.arange(len(keys) - len(q_QNH), len(keys))[:, None]
        behind = position - torch.arange(len(keys))
        seen_QL = (behind >= 0) & (behind < (window or len(keys)))
        weights_NQL = scores_NQL.exp() * seen_QL
        total_NQ1 = weights_NQL.sum(-1, keepdim=True)
        if sinks_N is not None:
            total_NQ1 = total_NQ1 + sinks_N.double().exp()[:, None, None]
        out.append(torch.einsum("nql,lnh->qnh", weights_NQL / total_NQ1, v_LNH))
    return torch.cat(out)


def check(
    ops: Ops,
    case: Case,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: Tensor | None = None,
) -> None:
    dtype = case.q_TNH.dtype
    scales = () if case.scales_2 is None else (case.scales_2,)
    out = ops.paged_attention(case.q_TNH, case.cache, case.batch, scale, window, soft_cap, sinks_N, *scales)
    assert out.dtype == dtype
    wanted = naive(case, scale, window, soft_cap, sinks_N)
    torch.testing.assert_close(out.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@tables
@pytest.mark.parametrize("window", [None, 1, 4, 7, 1000])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_mixed_batch(ops: Ops, window: int | None, soft_cap: float | None, sinks: bool) -> None:
    check(ops, make_case(ops, MIXED), 0.5, window, soft_cap, torch.linspace(-3, 6, 6) if sinks else None)


@tables
@pytest.mark.parametrize("head_size", [1, 7, 33, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (8, 1)], ids=str)
def test_heads(ops: Ops, head_size: int, heads: tuple[int, int]) -> None:
    """Sizes of heads, and query heads for each key/value head: 1, 3 and 8."""
    check(ops, make_case(ops, [(1, 20), (4, 37), (1, 3)], torch.float32, *heads, head_size, 16), head_size**-0.5)


@tables
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("window", [None, 100])
def test_blocks_and_long_contexts(ops: Ops, block_size: int, window: int | None) -> None:
    case = make_case(ops, LONG, head_size=16, block_size=block_size)
    check(ops, case, 0.25, window, None, torch.linspace(-1, 4, 6))


@tables
@pytest.mark.parametrize("requests", [MIXED, LONG], ids=["mixed", "long"])
@pytest.mark.parametrize("window", [1, 6, 100])
def test_blocks_before_the_window_may_be_anything(ops: Ops, window: int, requests: list[tuple[int, int]]) -> None:
    """They may have been given to others since: here all of them are one block of NaN."""
    case = make_case(ops, requests, head_size=16, block_size=4)
    used = set(case.batch.block_table.flatten().tolist())
    unused = next(block for block in range(len(used) + 1) if block not in used)
    for row, (queries, length) in enumerate(requests):
        case.batch.block_table[row, : max(0, length - queries - window + 1) // 4] = unused
    check(ops, case, 0.25, window)


@tables
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(ops: Ops, dtype: torch.dtype) -> None:
    check(ops, make_case(ops, MIXED, dtype), 0.3, 20, None, torch.linspace(-3, 6, 6).to(dtype))


STORED = [*LARGEST, torch.float16]


@tables
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("head_size", [1, 16, 33, 80])
@pytest.mark.parametrize("block_size", [1, 8, 48])
def test_caches_in_other_dtypes(ops: Ops, stored: torch.dtype, head_size: int, block_size: int) -> None:
    if not (ops is REFERENCE or isinstance(getattr(ops.write_kv, "__self__", None), NativeOps)):
        pytest.skip("it has caches in the model's dtype only")
    scales = torch.tensor([0.03, 0.7]) if stored in LAYER_SCALED else None
    case = make_case(ops, MIXED, torch.float32, 6, 2, head_size, block_size, stored, scales)
    for window in (None, 7):
        check(ops, case, head_size**-0.5, window, None, torch.linspace(-3, 6, 6))
    whole = ops.kv_cache_shape(4, block_size, 2, head_size, torch.float32)
    bits = torch.Size(ops.kv_cache_shape(4, block_size, 2, head_size, stored)).numel() * stored.itemsize
    codes = torch.Size(whole).numel() * (2 if stored == torch.float16 else 1)
    assert codes * head_size <= bits * head_size <= codes * (head_size + 4)
    assert (bits > codes) == (stored in HEAD_SCALED)


@pytest.mark.parametrize("stored", LARGEST, ids=str)
def test_compiled_codes_are_those_of_the_reference(variant: str, stored: torch.dtype) -> None:
    """Of all magnitudes, of numbers half way between two codes, of zeros and what no code holds, to the last bit."""
    codes = torch.arange(256, dtype=torch.uint8)
    plain = widened(
        codes.view(torch.int8).float()
        if stored == torch.int8
        else codes.view(stored if stored in LAYER_SCALED else torch.float8_e4m3fn),
        None,
    )
    levels = plain[plain.isfinite()].sort().values
    middles = (levels[1:] + levels[:-1]) / 2
    random = torch.randn(2000) * torch.logspace(-9, 6, 2000)
    numbers = torch.cat(
        (levels, middles, middles.nextafter(levels[1:]), random, torch.tensor([0.0, -0.0, 1e30, -1e30]))
    )
    if stored in LAYER_SCALED:
        numbers = torch.cat((numbers, torch.tensor([float("inf"), -float("inf"), float("nan")])))
    k_TGH = torch.nn.functional.pad(numbers, (0, -len(numbers) % 20)).view(-1, 2, 10)
    k_TGH[0] = 0.0
    ops, slots = native(variant), torch.arange(len(k_TGH))
    cache = torch.zeros(ops.kv_cache_shape(-(-len(k_TGH) // 16), 16, 2, 10, stored), dtype=stored)
    ops.write_kv(k_TGH, -k_TGH, cache, slots)
    scaled = stored in HEAD_SCALED
    half = (
        cache.view(torch.uint8)
        .flatten()
        .split([(10 + 4 * scaled) * 16 * 2 * len(cache), (16 + 4 * scaled) * 32 * len(cache)])
    )
    for part, x_TGH, depth in zip(half, (k_TGH, -k_TGH), (10, 16), strict=True):
        tiles = part.view(len(cache), 2, -1)  # block, head
        found = tiles[..., : depth * 16].unflatten(-1, (depth, 16) if depth == 10 else (16, 16))
        found = (found.permute(0, 3, 1, 2) if depth == 10 else found.permute(0, 2, 1, 3)[..., :10]).flatten(0, 1)
        wanted = narrowed(x_TGH, stored, None).view(torch.uint8)
        assert torch.equal(found[: len(x_TGH)], wanted[..., :10])
        if scaled:
            scales = tiles[..., depth * 16 :].unflatten(-1, (16, 4)).permute(0, 2, 1, 3).flatten(0, 1)
            assert torch.equal(scales[: len(x_TGH)], wanted[..., 10:])


@tables
def test_extreme_scores(ops: Ops) -> None:
    """Scores and sinks far beyond what exp can hold."""
    case = make_case(ops, MIXED)
    sinks = torch.tensor([-1e30, 1e30, 0.0, float("-inf"), 500.0, -500.0])
    out = ops.paged_attention(case.q_TNH, case.cache, case.batch, 1000.0, None, None, sinks)
    assert out.isfinite().all()
    without = ops.paged_attention(case.q_TNH, case.cache, case.batch, 1000.0)
    assert torch.equal(out[:, [0, 3]], without[:, [0, 3]])
    assert (out[:, 1] == 0).all()


def test_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one query in groups of every size, some of one."""
    monkeypatch.setattr(batch_module, "GROUP_TOKENS", 64)
    monkeypatch.setattr(batch_module, "SMALL_TOKENS", 8)
    case = make_case(REFERENCE, [(1, length) for length in (70, 3, 65, 1, 20, 21, 2, 2, 9, 33)])
    assert len(case.batch.singles) > 3
    assert sorted(row for group in case.batch.singles for row in group.rows.tolist()) == list(range(10))
    for window in (None, 5):
        check(REFERENCE, case, 0.5, window)


def cut(case: Case, row: int, queries: int, length: int) -> tuple[Tensor, AttentionBatch]:
    """A step that computes only some queries of one request, the last of which stands at `length - 1`."""
    end = int(case.batch.query_start[row + 1]) - (len(case.keys[row]) - length)
    tokens = slice(end - queries, end)
    batch = AttentionBatch.from_numpy(
        np.array([0, queries], dtype=np.int32),
        np.array([length], dtype=np.int32),
        case.batch.block_table[row : row + 1].numpy(),
        case.batch.slot_mapping[tokens].numpy(),
    )
    return case.q_TNH[tokens], batch


@pytest.mark.parametrize("window", [None, 60, 300])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, *LARGEST], ids=str)
def test_compiled_rows_are_the_same_bits_alone_and_with_more_threads(
    variant: str, stored: torch.dtype, window: int | None
) -> None:
    """However many queries of a request are in the step, whatever else is, and for any number of threads."""
    ops = native(variant)
    dtype = torch.float32 if stored in LARGEST else stored
    case = make_case(ops, LONG, dtype, head_size=20, block_size=16, stored=stored)
    sinks = torch.linspace(-1, 4, 6)
    whole = ops.paged_attention(case.q_TNH, case.cache, case.batch, 0.2, window, 3.0, sinks)
    for threads in (1, 2, 3):
        table = native(variant, threads)
        assert torch.equal(table.paged_attention(case.q_TNH, case.cache, case.batch, 0.2, window, 3.0, sinks), whole)
        for row, (queries, length) in enumerate(LONG):
            first = int(case.batch.query_start[row])
            for begin, end in ((0, queries), (queries - 1, queries), (0, 1), (queries // 2, queries)):
                q, batch = cut(case, row, end - begin, length - (queries - end))
                part = table.paged_attention(q, case.cache, batch, 0.2, window, 3.0, sinks)
                assert torch.equal(part, whole[first + begin : first + end]), (threads, row, begin, end)


@pytest.mark.parametrize("ops", INTERPRETED, indirect=True)
@pytest.mark.parametrize("window", [None, 300])
def test_interpreted_rows_are_the_same_bits_alone(ops: Ops, window: int | None) -> None:
    """Whole and in chunks; with contexts of one split and of several.

    Chunks begin where a tile of rows does: a GPU's products do not depend on a row's place in its tile, but those of
    the BLAS that the interpreter calls do, by a bit.
    """
    requests = [(1, 700), (2, 520), (40, 90)]
    case = make_case(ops, requests, heads=4, head_size=16, block_size=16)
    sinks = torch.linspace(-1, 4, 4)
    whole = ops.paged_attention(case.q_TNH, case.cache, case.batch, 0.2, window, 3.0, sinks)
    for row, (queries, length) in enumerate(requests):
        first = int(case.batch.query_start[row])
        for begin, end in ((0, queries), (0, 1), (min(32, queries - 1) // 32 * 32, queries)):
            q, batch = cut(case, row, end - begin, length - (queries - end))
            part = ops.paged_attention(q, case.cache, batch, 0.2, window, 3.0, sinks)
            assert torch.equal(part, whole[first + begin : first + end]), (row, begin, end)


def test_batch_numbers() -> None:
    case = make_case(REFERENCE, MIXED)
    assert case.batch.longer == (2, 3, 5, 7)
    assert case.batch.slot_mapping.dtype == torch.int64
    assert {case.batch.query_start.dtype, case.batch.seq_lens.dtype, case.batch.block_table.dtype} == {torch.int32}


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("prefix", [256, 700])
def test_a_shared_prefix_computed_once_gives_the_same_bits(variant: str, prefix: int, window: int | None) -> None:
    """As computed for each request by itself; others in the step notice nothing."""
    requests = [(1, 710), (1, 701), (3, 40), *[(1, 702 + i) for i in range(20)], (1, 900)]
    sharers = [0, 1, *range(3, 23)]
    for threads in (1, 3):
        ops = native(variant, threads)
        stored = torch.bfloat16 if threads == 1 else torch.int8
        case = make_case(ops, requests, torch.bfloat16, head_size=20, block_size=16, stored=stored)
        case.batch.block_table[sharers, : prefix // 16] = case.batch.block_table[0, : prefix // 16]
        shared = SharedPrefix(torch.tensor(sharers, dtype=torch.int32), prefix // 16 * 16)
        sinks = torch.linspace(-1, 4, 6)
        each, once = (
            ops.paged_attention(case.q_TNH, case.cache, batch, 0.2, window, 3.0, sinks)
            for batch in (case.batch, replace(case.batch, shared=shared))
        )
        assert each.isfinite().all()
        assert torch.equal(each, once)
