"""Every version of latent attention against its formula in float64, and against rows computed alone.

Caches hold NaN wherever nothing was written.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rayllm_kernels import REFERENCE, Ops, SharedPrefix
from rayllm_kernels.native.program import LayerCache, cache_bytes
from rayllm_kernels.storage import DTYPES, HEAD_SCALED, LARGEST, LAYER_SCALED, narrowed, widened
from tests.kernels.conftest import native, variants
from tests.kernels.test_attention import LONG, MIXED, TOLERANCE, Case, cut, make_case, naive

tables = pytest.mark.parametrize("ops", ["reference", *variants()], indirect=True)
VALUE = 20
"""Entries of a value, unless a test says so."""


def make_latent(
    ops: Ops,
    requests: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    heads: int = 6,
    size: int = 28,
    block_size: int = 16,
    stored: torch.dtype | None = None,
    scales_2: Tensor | None = None,
    value: int = VALUE,
) -> Case:
    """A step over a cache of random vectors of `size`, stored as `stored`."""
    stored = stored or dtype
    case = make_case(REFERENCE, requests, dtype, heads, 1, size, block_size)
    blocks = case.cache.shape[1]
    cache = torch.empty(ops.latent_cache_shape(blocks, block_size, size, stored), dtype=stored)
    cache.view(torch.uint8).fill_(0xFF)
    keys, scale = [], None if scales_2 is None else scales_2[0]
    for row, x_L1C in enumerate(case.keys):
        positions = torch.arange(len(x_L1C))
        slots = case.batch.block_table[row, positions // block_size].long() * block_size + positions % block_size
        ops.write_latent(x_L1C.flatten(1).to(dtype), cache, slots, scales_2)
        keys.append(widened(narrowed(x_L1C, stored, scale), scale))
    return replace(case, cache=cache, keys=keys, values=[x[..., -value:] for x in keys], scales_2=scales_2)


def check(ops: Ops, case: Case, scale: float) -> None:
    dtype, value = case.q_TNH.dtype, case.values[0].shape[-1]
    out = ops.latent_attention(case.q_TNH, case.cache, case.batch, scale, value, case.scales_2)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), naive(case, scale), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@tables
@pytest.mark.parametrize(("heads", "size", "value"), [(1, 1, 1), (3, 28, 20), (65, 40, 32), (6, 576, 512)])
def test_mixed_batch(ops: Ops, heads: int, size: int, value: int) -> None:
    """One head and many, odd sizes and DeepSeek's own."""
    check(ops, make_latent(ops, MIXED, heads=heads, size=size, value=value, block_size=4), size**-0.5)


@tables
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_blocks_and_long_contexts(ops: Ops, block_size: int) -> None:
    check(ops, make_latent(ops, LONG, block_size=block_size), 0.25)


@tables
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(ops: Ops, dtype: torch.dtype) -> None:
    check(ops, make_latent(ops, MIXED, dtype), 0.2)


@tables
@pytest.mark.parametrize("stored", [*LARGEST, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [4, 32])
def test_caches_in_other_dtypes(ops: Ops, stored: torch.dtype, block_size: int) -> None:
    """By the first of the scales, keys and values alike; and in no more memory than one vector of each token."""
    scales = torch.tensor([0.03, 0.7]) if stored in LAYER_SCALED else None
    check(ops, make_latent(ops, LONG, block_size=block_size, stored=stored, scales_2=scales), 0.2)
    if block_size == 32:
        numbers = torch.Size(ops.latent_cache_shape(5, 32, 28, stored)).numel()
        assert numbers * stored.itemsize == 5 * 32 * (28 * stored.itemsize + (4 if stored in HEAD_SCALED else 0))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_compiled_cache_takes_what_it_says(dtype: torch.dtype) -> None:
    (vectors,) = LayerCache(5, 32, 1, 28, dtype, VALUE).parts()
    assert vectors.nbytes == 5 * cache_bytes(32, 1, 28, dtype, VALUE)
    assert vectors.nbytes == 5 * 32 * (28 * dtype.itemsize + (4 if dtype in HEAD_SCALED else 0))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_compiled_rows_are_the_same_bits_alone_and_with_more_threads(variant: str, stored: torch.dtype) -> None:
    """However many queries of a request are in the step, whatever else is, and for any number of threads."""
    dtype = torch.float32 if stored in LARGEST else stored
    case = make_latent(native(variant), LONG, dtype, stored=stored)
    whole = native(variant).latent_attention(case.q_TNH, case.cache, case.batch, 0.2, VALUE)
    for threads in (1, 3):
        ops = native(variant, threads)
        assert torch.equal(ops.latent_attention(case.q_TNH, case.cache, case.batch, 0.2, VALUE), whole)
        for row, (queries, length) in enumerate(LONG):
            first = int(case.batch.query_start[row])
            for begin, end in ((0, queries), (queries - 1, queries), (0, 1), (queries // 2, queries)):
                q, batch = cut(case, row, end - begin, length - (queries - end))
                part = ops.latent_attention(q, case.cache, batch, 0.2, VALUE)
                assert torch.equal(part, whole[first + begin : first + end]), (threads, row, begin, end)


def test_a_shared_prefix_computed_once_gives_the_same_bits(variant: str) -> None:
    requests = [(1, 710), (1, 701), (3, 40), *[(1, 702 + i) for i in range(20)], (1, 900)]
    sharers = [0, 1, *range(3, 23)]
    ops = native(variant, 3)
    case = make_latent(ops, requests)
    case.batch.block_table[sharers, :43] = case.batch.block_table[0, :43]
    shared = SharedPrefix(torch.tensor(sharers, dtype=torch.int32), 43 * 16)
    each, once = (
        ops.latent_attention(case.q_TNH, case.cache, batch, 0.2, VALUE)
        for batch in (case.batch, replace(case.batch, shared=shared))
    )
    assert each.isfinite().all()
    assert torch.equal(each, once)
