"""Matrices of 8 bits, read in part."""

from typing import Any

import pytest
import torch

from rayllm.model.checkpoint import LoadedTensor
from rayllm.model.fp8 import BlockScaledTensor


@pytest.mark.parametrize("rows", [slice(None), slice(0, 16), slice(5, 7), slice(10, 40), slice(39, 40)], ids=str)
@pytest.mark.parametrize("columns", [None, slice(0, 8), slice(3, 4), slice(6, 21)], ids=str)
def test_any_part_of_a_matrix_with_scales_of_blocks(rows: slice, columns: slice | None) -> None:
    stored, scales = torch.randn(40, 21).to(torch.float8_e4m3fn), torch.rand(3, 3)
    whole = stored.float() * scales.repeat_interleave(16, 0)[:40].repeat_interleave(8, 1)[:, :21]
    tensors: list[Any] = [LoadedTensor("file", "name", tensor) for tensor in (stored, scales)]
    got = BlockScaledTensor(*tensors, (16, 8)).read(rows, columns)
    assert torch.equal(got, whole[rows] if columns is None else whole[rows, columns])
