"""The table of operations, and the choice of a version for each."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rayllm_kernels import attention, cpu, reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One version of every operation. The contracts are the docstrings in `reference` and `attention`.

    A faster table is made from a slower one with `dataclasses.replace`.
    """

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_tanh_and_mul: Callable[[Tensor], Tensor]
    linear: Callable[..., Tensor]
    embedding: Callable[[Tensor, Tensor], Tensor]
    kv_cache_shape: Callable[[int, int, int, int], tuple[int, ...]]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[..., Tensor]


REFERENCE = Ops(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    rotary=reference.rotary,
    silu_and_mul=reference.silu_and_mul,
    gelu_tanh_and_mul=reference.gelu_tanh_and_mul,
    linear=reference.linear,
    embedding=reference.embedding,
    kv_cache_shape=attention.kv_cache_shape,
    write_kv=attention.write_kv,
    paged_attention=attention.paged_attention,
)


def select(platform: str) -> Ops:
    """The fastest table for a platform, `cpu` or `cuda`.

    Raises:
        ValueError: no such platform.
    """
    if platform not in _TABLES:
        raise ValueError(f"platform {platform!r}: must be one of {', '.join(_TABLES)}")
    return _TABLES[platform]()


def _cpu() -> Ops:
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return REFERENCE if wide else replace(REFERENCE, linear=cpu.linear)


_TABLES: dict[str, Callable[[], Ops]] = {"cpu": _cpu, "cuda": lambda: REFERENCE}
