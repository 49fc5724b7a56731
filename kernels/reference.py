"""The operations in plain torch. Docstrings here are the contracts of all versions.

Letters of shapes: T tokens, D width, N query heads, G key/value heads, H head size, R rotated entries of a head.
Normalisation, rotation and activation compute in float32 and round once, to the dtype of their input.
"""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Divide each row by its root mean square, multiply by the weight (Zhang and Sennrich, 2019).

    `plus_one` multiplies by 1 + weight, as Gemma stores it. Leading dimensions may be several.
    """
    x = x_TD.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    weight = weight_D.float()
    return (x * (1.0 + weight if plus_one else weight)).to(x_TD.dtype)


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalise the sum: (rms_norm(residual + x), residual + x).

    The sum is rounded to the dtype before it is normalised. Versions may write over both inputs.
    """
    residual_TD = residual_TD + x_TD
    return rms_norm(residual_TD, weight_D, eps, plus_one), residual_TD


def rotary(q_TNH: Tensor, k_TGH: Tensor, cos_sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R entries of every head by its token's angles (Su et al., 2021; halves, not pairs).

    `cos_sin_TR` is float32: R / 2 cosines, then R / 2 sines. Entry i is rotated with entry i + R / 2. Versions may
    write over q and k.
    """
    cos_T1R, sin_T1R = cos_sin_TR.unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q_TNH, cos_T1R, sin_T1R), _rotate(k_TGH, cos_T1R, sin_T1R)


def _rotate(x_TNH: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    half = cos_T1R.shape[-1]
    first, second, rest = x_TNH.split([half, half, x_TNH.shape[-1] - 2 * half], dim=-1)
    first, second = first.float(), second.float()
    rotated = torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1)
    rotated = rotated.to(x_TNH.dtype)
    return rotated if not rest.shape[-1] else torch.cat((rotated, rest), dim=-1)


def silu_and_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(first half) * second half, over the last dimension (SwiGLU; Shazeer, 2020)."""
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return (functional.silu(gate.float()) * up.float()).to(gate_up_TF.dtype)


def gelu_tanh_and_mul(gate_up_TF: Tensor) -> Tensor:
    """gelu(first half) * second half, gelu in its tanh approximation (GeGLU; Shazeer, 2020)."""
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return (functional.gelu(gate.float(), approximate="tanh") * up.float()).to(gate_up_TF.dtype)


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias."""
    return functional.linear(x_TD, weight_ED, bias_E)


def embedding(token_ids_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of the table; ids are int32 or int64 and in range."""
    return functional.embedding(token_ids_T, weight_VD)
