"""How a cache stores keys and values: as they are, or in eight bits with scales. The tensor's dtype says which.

Letters of shapes: T tokens, G key/value heads, H head size, E entries of a stored head.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.uint8,
}
"""By name. The last is float8_e4m3fn too, behind which bytes follow that are none."""
LARGEST: Mapping[torch.dtype, float] = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.int8: 127.0,
    torch.uint8: 448.0,
}
"""The largest number that is stored, of dtypes of eight bits. What is larger is stored as that."""
LAYER_SCALED = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
"""A layer has one scale for all keys, and one for all values, that the caller brings."""
HEAD_SCALED = frozenset({torch.int8, torch.uint8})
"""Each token has a scale for each head, which follows its entries as the bytes of a float32."""
HEADROOM = 2.0
"""How much larger than the largest of the first step later numbers may be before they are cut."""


def entries(head_size: int, dtype: torch.dtype) -> int:
    """Entries of the stored keys, or values, of one token and head."""
    return head_size + 4 if dtype in HEAD_SCALED else head_size


def layer_scales(k_TGH: Tensor, v_TGH: Tensor, dtype: torch.dtype) -> Tensor:
    """(2) float32: scales of a layer whose first keys and values are these."""
    most = torch.stack([x.float().abs().amax() for x in (k_TGH, v_TGH)])
    usable = most.isfinite() & (most > 0)
    return torch.where(usable, most * (HEADROOM / LARGEST[dtype]), torch.ones_like(most))


def narrowed(x_TGH: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """(T, G, E) as a cache of `dtype` stores them, rounded to nearest, ties to even. `None` is a scale of 1."""
    if dtype not in LARGEST:
        return x_TGH.to(dtype)
    x_TGH, largest = x_TGH.float(), LARGEST[dtype]
    if dtype in HEAD_SCALED:
        most_TG1 = x_TGH.abs().amax(-1, keepdim=True)
        scale = torch.where(most_TG1 == 0, 1.0, most_TG1 / largest)
    if scale is not None:
        x_TGH = x_TGH / scale
    x_TGH = x_TGH.clamp(-largest, largest)
    if dtype in LAYER_SCALED:
        return x_TGH.to(dtype)
    assert scale is not None
    codes = x_TGH.round().nan_to_num().to(torch.int8) if dtype == torch.int8 else x_TGH.to(torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), dim=-1).view(dtype)


def widened(stored: Tensor, scale: Tensor | None) -> Tensor:
    """(..., H) float32 of (..., E) as they are stored."""
    if stored.dtype in HEAD_SCALED:
        codes, scales = stored.view(torch.uint8).split((stored.shape[-1] - 4, 4), dim=-1)
        codes = codes.view(torch.int8 if stored.dtype == torch.int8 else torch.float8_e4m3fn)
        return codes.float() * scales.contiguous().view(torch.float32)
    if stored.dtype in LAYER_SCALED and scale is not None:
        return stored.float() * scale
    return stored.float()
