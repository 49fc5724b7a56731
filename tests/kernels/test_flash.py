"""The adapter to vllm-flash-attn, against the documented meaning of the library's function."""

import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from rayllm_kernels import REFERENCE
from tests.kernels.test_attention import MIXED, make_case


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: Tensor,
) -> Tensor:
    """What flash_attn_varlen_func's docstring says of these arguments, for paged keys and values."""
    assert causal
    assert {cu_seqlens_q.dtype, cu_seqlens_k.dtype, block_table.dtype} == {torch.int32}
    out = torch.empty_like(q)
    spans = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), block_table, strict=True)
    for (start, end), (k_start, k_end), blocks in spans:
        queries, length = end - start, k_end - k_start
        assert queries <= max_seqlen_q
        assert length <= max_seqlen_k
        keys, values = (part[blocks.long()].flatten(0, 1)[:length] for part in (k, v))
        ratio = q.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(ratio, 1) for part in (keys, values))
        scores = torch.einsum("qnh,knh->nqk", q[start:end], keys) * softmax_scale
        if softcap:
            scores = (scores / softcap).tanh() * softcap
        place = torch.arange(queries)[:, None] + length - queries
        seen = torch.arange(length) <= place
        if window_size != (-1, -1):
            seen &= (torch.arange(length) >= place - window_size[0]) & (torch.arange(length) <= place + window_size[1])
        out[start:end] = torch.einsum("nqk,knh->qnh", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)
    return out


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    library = ModuleType("vllm_flash_attn")
    library.flash_attn_varlen_func = varlen
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", library)
    monkeypatch.delitem(sys.modules, "rayllm_kernels.flash", raising=False)
    yield import_module("rayllm_kernels.flash")
    sys.modules.pop("rayllm_kernels.flash", None)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_the_same_as_the_reference(flash: ModuleType, window: int | None, soft_cap: float | None) -> None:
    case = make_case(REFERENCE, MIXED)
    arguments = (case.q_TNH, case.cache, case.batch, 0.3, window, soft_cap)
    torch.testing.assert_close(flash.paged_attention(*arguments), REFERENCE.paged_attention(*arguments))
