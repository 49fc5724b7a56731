"""Norms, rotation and gated activations: one program a row, or a head of it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""Columns of an activation that one program computes."""


@triton.jit
def norm_kernel(
    x, residual, weight, out, x_stride, x_head, r_stride, out_stride, out_head, width, eps,
    ADD: tl.constexpr, PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + head * x_head + column, inside, 0.0)
    if ADD:
        at = residual + row * r_stride + column
        value = (tl.load(at, inside, 0.0).to(tl.float32) + value.to(tl.float32)).to(value.dtype)
        tl.store(at, value, inside)
    wide = value.to(tl.float32)
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    normed = wide * (1.0 / tl.sqrt(tl.sum(wide * wide) / width + eps)) * factor
    tl.store(out + row * out_stride + head * out_head + column, normed.to(value.dtype), inside)


@triton.jit
def rotary_kernel(
    q, k, angles, q_stride, q_head, k_stride, k_head, angle_stride, heads, half, BLOCK: tl.constexpr
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.arange(0, BLOCK)
    inside = entry < half
    cos = tl.load(angles + row * angle_stride + entry, inside, 0.0)
    sin = tl.load(angles + row * angle_stride + half + entry, inside, 0.0)
    if head < heads:
        at = q + row * q_stride + head * q_head + entry
    else:
        at = k + row * k_stride + (head - heads) * k_head + entry
    first, second = tl.load(at, inside, 0.0), tl.load(at + half, inside, 0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(at, (a * cos - b * sin).to(first.dtype), inside)
    tl.store(at + half, (b * cos + a * sin).to(first.dtype), inside)


@triton.jit
def gated_kernel(gate_up, out, in_stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = gate_up + row * in_stride + column
    stored = tl.load(at, inside, 0.0)
    gate, up = stored.to(tl.float32), tl.load(at + width, inside, 0.0).to(tl.float32)
    # gelu's 0.5 * (1 + tanh(y)) is sigmoid(2 y).
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    tl.store(out + row * width + column, (gate * tl.sigmoid(inner) * up).to(stored.dtype), inside)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """See `reference.rms_norm`; one or two leading dimensions, the last contiguous."""
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    x, to = (part if part.ndim == 3 else part.unsqueeze(1) for part in (x_TD, out))
    width = x.shape[2]
    norm_kernel[x.shape[:2]](
        x, x, weight_D, to, x.stride(0), x.stride(1), 0, to.stride(0), to.stride(1), width, eps,
        ADD=False, PLUS_ONE=plus_one, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`; writes over the residual."""
    out_TD = torch.empty_like(x_TD)
    norm_kernel[(len(x_TD), 1)](
        x_TD, residual_TD, weight_D, out_TD, x_TD.stride(0), 0, residual_TD.stride(0), out_TD.stride(0), 0,
        x_TD.shape[1], eps, ADD=True, PLUS_ONE=plus_one, BLOCK=triton.next_power_of_2(x_TD.shape[1]),
    )  # fmt: skip
    return out_TD, residual_TD


def rotary(q_TNH: Tensor, k_TGH: Tensor, cos_sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.rotary`; in place."""
    heads, half = q_TNH.shape[1], cos_sin_TR.shape[1] // 2
    rotary_kernel[(len(q_TNH), heads + k_TGH.shape[1])](
        q_TNH, k_TGH, cos_sin_TR, q_TNH.stride(0), q_TNH.stride(1), k_TGH.stride(0), k_TGH.stride(1),
        cos_sin_TR.stride(0), heads, half, BLOCK=triton.next_power_of_2(half),
    )  # fmt: skip
    return q_TNH, k_TGH


def silu_and_mul(gate_up_TF: Tensor) -> Tensor:
    """See `reference.silu_and_mul`."""
    return _gated(gate_up_TF, gelu=False)


def gelu_tanh_and_mul(gate_up_TF: Tensor) -> Tensor:
    """See `reference.gelu_tanh_and_mul`."""
    return _gated(gate_up_TF, gelu=True)


def _gated(gate_up_TF: Tensor, gelu: bool) -> Tensor:
    width = gate_up_TF.shape[1] // 2
    out_TF = gate_up_TF.new_empty(len(gate_up_TF), width)
    grid = (len(gate_up_TF), triton.cdiv(width, COLUMNS))
    gated_kernel[grid](gate_up_TF, out_TF, gate_up_TF.stride(0), width, GELU=gelu, BLOCK=COLUMNS)
    return out_TF
