"""Products with experts for GPUs: rows gathered by expert, in tiles that each belong to one.

A tile is always computed whole, so that a row's sums have one order whatever the other rows are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayllm_kernels.experts import ExpertWeights, activate

ROWS = 32
COLUMNS = 64
DEPTH = 32


@triton.jit
def grouped_kernel(
    x, weight, bias, out, sources, tile_experts, tile_rows, tile_ends, x_stride, columns, depth,
    BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows; tiles of columns. Row i of `out` is row `sources[i]` of x times its expert's matrix."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    row = tl.load(tile_rows + tile).to(tl.int64) + tl.arange(0, M)
    inside = row < tl.load(tile_ends + tile)
    column = tl.program_id(1) * N + tl.arange(0, N)
    real = column < columns
    source = tl.load(sources + row, inside, 0).to(tl.int64)
    matrix = weight + expert * columns * depth
    acc = tl.zeros([M, N], tl.float32)
    for begin in range(0, depth, K):
        k = begin + tl.arange(0, K)
        deep = k < depth
        x_MK = tl.load(x + source[:, None] * x_stride + k[None, :], inside[:, None] & deep[None, :], 0.0)
        w_NK = tl.load(matrix + column.to(tl.int64)[:, None] * depth + k[None, :], real[:, None] & deep[None, :], 0.0)
        acc += tl.dot(x_MK, tl.trans(w_NK), input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + expert * columns + column, real, 0.0).to(tl.float32)[None, :]
    to = out + row[:, None] * columns + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), inside[:, None] & real[None, :])


def experts(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: ExpertWeights, input_scaled: bool = False
) -> Tensor:
    """See `experts.experts`."""
    rows, chosen = ids_TK.shape
    count = len(weights.down_PDI)
    ids_S = torch.where(ids_TK < 0, count, ids_TK).flatten()  # those of other ranks last, and in no tile
    order_S = ids_S.argsort(stable=True)
    ends_P = torch.bincount(ids_S, minlength=count + 1)[:count].cumsum(0)
    tiles = _tiles(ends_P, len(ids_S))
    if input_scaled:
        x_TD = (x_TD[order_S // chosen] * weights_TK.flatten()[order_S, None]).to(x_TD.dtype)
        sources_S = torch.arange(len(order_S), device=x_TD.device)
    else:
        sources_S = order_S // chosen
    gate_up_SF = _grouped(x_TD, sources_S, weights.gate_up_PFD, weights.gate_up_bias_PF, tiles)
    inner_SI, own_S = activate(gate_up_SF, weights), torch.arange(len(order_S), device=x_TD.device)
    y_SD = x_TD.new_zeros(rows * chosen, x_TD.shape[1])
    y_SD[order_S] = _grouped(inner_SI, own_S, weights.down_PDI, weights.down_bias_PD, tiles)
    y_TKD = y_SD.view(rows, chosen, x_TD.shape[1]).float()
    total_TD = torch.zeros(rows, x_TD.shape[1], dtype=torch.float32, device=x_TD.device)
    for choice in range(chosen):
        total_TD += y_TKD[:, choice] if input_scaled else y_TKD[:, choice] * weights_TK[:, choice, None]
    return total_TD.to(x_TD.dtype)


def _tiles(ends_P: Tensor, pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each tile its expert, its first row and the end of the expert's; as many as there could be, the rest empty.

    Their number is not asked of the GPU, which would have to finish first.
    """
    count = len(ends_P)
    begins_P = torch.cat((ends_P.new_zeros(1), ends_P[:-1]))
    tile_ends_P = ((ends_P - begins_P + ROWS - 1) // ROWS).cumsum(0)
    tile = torch.arange(triton.cdiv(pairs, ROWS) + count, device=ends_P.device)
    expert = torch.searchsorted(tile_ends_P, tile, right=True).clamp(max=count - 1)
    first = tile - torch.cat((tile_ends_P.new_zeros(1), tile_ends_P[:-1]))[expert]
    return expert, begins_P[expert] + first * ROWS, ends_P[expert]


def _grouped(
    x: Tensor, sources_S: Tensor, weight: Tensor, bias: Tensor | None, tiles: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    columns, depth = weight.shape[1:]
    out = x.new_zeros(len(sources_S), columns)
    if not len(sources_S):
        return out
    x, weight = x.contiguous(), weight.contiguous()
    grouped_kernel[(len(tiles[0]), triton.cdiv(columns, COLUMNS))](
        x, weight, weight if bias is None else bias.contiguous(), out, sources_S, *tiles, x.stride(0), columns, depth,
        BIAS=bias is not None, M=ROWS, N=COLUMNS, K=DEPTH,
    )  # fmt: skip
    return out
