"""Products with the experts that each row was sent to, in plain torch. The docstring is the contract of all versions.

Letters of shapes: T rows, K choices of a row, P experts that are held, D width, I inner width of an expert.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["silu", "gelu_tanh", "clamped"]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Gated MLPs that lie together."""

    gate_up_PFD: Tensor
    """F is 2 I: rows of the gate, then those of what it multiplies."""
    down_PDI: Tensor
    gate_up_bias_PF: Tensor | None = None
    down_bias_PD: Tensor | None = None
    activation: Activation = "silu"
    alpha: float = 1.0
    limit: float = 0.0
    """Numbers of the activation `clamped`."""


def experts(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: ExpertWeights, input_scaled: bool = False
) -> Tensor:
    """The weighted sum of each row's experts, (T, D) in the dtype of x.

    `ids_TK` (int64) number the experts held, or are negative for a choice that is not computed here; `weights_TK` is
    float32. `input_scaled` multiplies rows by their weights before an expert instead of after it. The outputs of a row
    are added in float32 in the order of its choices, and rounded once, so that other rows change nothing but rounding.
    """
    y_TKD = x_TD.new_zeros(*ids_TK.shape, x_TD.shape[1])
    for expert in ids_TK[ids_TK >= 0].unique().tolist():
        rows, choices = (ids_TK == expert).nonzero(as_tuple=True)
        x = x_TD[rows]
        if input_scaled:
            x = (x * weights_TK[rows, choices].unsqueeze(1)).to(x.dtype)
        bias = None if weights.gate_up_bias_PF is None else weights.gate_up_bias_PF[expert]
        inner = activate(functional.linear(x, weights.gate_up_PFD[expert], bias), weights)
        bias = None if weights.down_bias_PD is None else weights.down_bias_PD[expert]
        y_TKD[rows, choices] = functional.linear(inner, weights.down_PDI[expert], bias)
    total_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for choice in range(ids_TK.shape[1]):
        y_TD = y_TKD[:, choice].float()
        total_TD += y_TD if input_scaled else y_TD * weights_TK[:, choice, None]
    return total_TD.to(x_TD.dtype)


def activate(gate_up_TF: Tensor, weights: ExpertWeights) -> Tensor:
    """act(first half) * second half; computed in float32.

    `clamped`: g * sigmoid(alpha * g) * (u + 1), with g at most `limit` and u from -limit to limit (as in GPT-OSS).
    """
    gate, up = gate_up_TF.float().chunk(2, dim=-1)
    match weights.activation:
        case "silu":
            out = functional.silu(gate) * up
        case "gelu_tanh":
            out = functional.gelu(gate, approximate="tanh") * up
        case "clamped":
            gate, up = gate.clamp(max=weights.limit), up.clamp(-weights.limit, weights.limit)
            out = gate * torch.sigmoid(gate * weights.alpha) * (up + 1.0)
    return out.to(gate_up_TF.dtype)
