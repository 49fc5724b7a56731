"""The block formats of ggml, turned into float32.

A row of a tensor is a run of blocks; a block holds 32 or 256 values as small integers with scales of their own.
Layouts: the structs `block_*` of the ggml project. Integers of less than a byte lie with values far apart in one
byte, so that a vector unit unpacks a run of them at once; `_nibbles` and `_bits` undo this.

Letters of shapes: R rows, B bytes of a row, N blocks (of all rows), the number of values last.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rayllm.config.gguf_file import BLOCKS


def dequantize(data_RB: Tensor, kind: str) -> Tensor:
    """The values of whole rows, (R, columns) float32, from their bytes, (R, B) uint8. `kind` is one of `BLOCKS`."""
    rows, (_, values, size) = len(data_RB), BLOCKS[kind]
    if kind in _PLAIN:
        return data_RB.contiguous().view(_PLAIN[kind]).float()
    blocks = data_RB.reshape(-1, size)
    return _FORMATS[kind](blocks).reshape(rows, data_RB.shape[1] // size * values)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """(N, count) of the float16 numbers at byte `start`."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """(..., b) bytes to (..., 2 b) numbers below 16: the lower halves of all, then the upper halves."""
    return torch.cat((data & 0xF, data >> 4), dim=-1)


def _bits(data: Tensor, width: int, count: int) -> Tensor:
    """(..., b) bytes to (..., count, b) numbers of `width` bits, the lowest first."""
    shifts = torch.arange(0, width * count, width, dtype=torch.uint8).unsqueeze(1)
    return (data.unsqueeze(-2) >> shifts) & ((1 << width) - 1)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _halves(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]) * _halves(blocks, 0) + _halves(blocks, 2)


def _fifth_bits(data: Tensor) -> Tensor:
    """(N, 4) bytes to (N, 32) bits, each worth 16."""
    return _bits(data, 1, 8).transpose(1, 2).flatten(1) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return (values.float() - 16) * _halves(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return values * _halves(blocks, 0) + _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8) * _halves(blocks, 0)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(N, 8, 1) scales and minima of the eight parts of a block, from 6-bit numbers in 12 bytes after two halves.

    The first four of each have a byte, whose upper two bits belong to the last four; these have their lower four bits
    in the last four bytes.
    """
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (last & 0xF) | (first >> 6 << 4)), dim=1)
    minima = torch.cat((second & 63, (last >> 4) | (second >> 6 << 4)), dim=1)
    return (_halves(blocks, 0) * scales).unsqueeze(2), (_halves(blocks, 2) * minima).unsqueeze(2)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks)
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return values * scales - minima


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks)
    values = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (values | _bits(blocks[:, 16:48], 1, 8) << 4) * scales - minima


def _q6_k(blocks: Tensor) -> Tensor:
    lower = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    upper = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2, 4)
    values = (lower | upper << 4).reshape(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].view(torch.int8) * _halves(blocks, 208)
    return values * scales.unsqueeze(2)


_FORMATS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
