"""Paged attention by vllm-flash-attn (FlashAttention 2; Dao, 2023), on GPUs that have it. Importing this imports it.

Rows can differ in rounding with what else is in the batch: the library splits a context by how many requests there are.
"""

import numpy as np
import torch
from torch import Tensor
from vllm_flash_attn import flash_attn_varlen_func

from rayllm_kernels.attention import kv_cache_shape, write_kv
from rayllm_kernels.batch import AttentionBatch

__all__ = ["kv_cache_shape", "paged_attention", "write_kv"]


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
    """See `attention.paged_attention`; without sinks and scales."""
    assert sinks_N is None, "the table offers this for models without sinks"
    assert scales_2 is None, "the table offers this for caches in the model's dtype"
    kv_start = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    out_TNH: Tensor = flash_attn_varlen_func(
        q_TNH, cache[0], cache[1], batch.query_start, kv_start,
        int(np.diff(batch.query_start_host).max()), int(batch.seq_lens_host.max()),
        softmax_scale=scale, causal=True, window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=soft_cap or 0.0, block_table=batch.block_table,
    )  # fmt: skip
    return out_TNH
