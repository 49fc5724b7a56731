"""Kernels in Triton for GPUs, under the contracts of `Ops`. Importing this imports Triton.

Block sizes are fixed and a row's sums have one order, so that its result does not depend on the batch.
"""

from rayllm_kernels.attention import kv_cache_shape
from rayllm_kernels.triton.attention import paged_attention, write_kv
from rayllm_kernels.triton.grouped import experts
from rayllm_kernels.triton.rows import add_rms_norm, gelu_tanh_and_mul, rms_norm, rotary, silu_and_mul

__all__ = [
    "add_rms_norm", "experts", "gelu_tanh_and_mul", "kv_cache_shape", "paged_attention", "rms_norm", "rotary",
    "silu_and_mul", "write_kv",
]  # fmt: skip
