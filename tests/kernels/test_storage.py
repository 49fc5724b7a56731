"""What the reference keeps of numbers in eight bits."""

import pytest
import torch

from rayllm_kernels.storage import HEAD_SCALED, LARGEST, LAYER_SCALED, entries, layer_scales, narrowed, widened

X_TGH = torch.randn(40, 3, 16, generator=torch.Generator().manual_seed(0))
STEP = {torch.float8_e4m3fn: 2**-4, torch.uint8: 2**-4, torch.float8_e5m2: 2**-3}
"""The largest error of rounding, relative to a number that is no subnormal."""


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e4])
def test_numbers_come_back_nearly(dtype: torch.dtype, factor: float) -> None:
    x_TGH = X_TGH * factor
    scales_2 = layer_scales(x_TGH, x_TGH, dtype) if dtype in LAYER_SCALED else (None, None)
    stored = narrowed(x_TGH, dtype, scales_2[0])
    assert (stored.dtype, stored.shape) == (dtype, (40, 3, entries(16, dtype)))
    error = (widened(stored, scales_2[0]) - x_TGH).abs()
    most = x_TGH.abs().amax(-1, keepdim=True)
    if dtype == torch.int8:
        assert (error <= most / 254 * 1.0001).all()
    else:
        assert (error <= x_TGH.abs() * STEP[dtype] + most * 1e-4).all()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_what_no_code_holds(dtype: torch.dtype) -> None:
    """Zeros stay zeros, numbers beyond the largest become that, and NaN stays NaN."""
    x_TGH = torch.tensor([[[0.0, 0.0]], [[1e6, -1e6]], [[float("nan"), 1.0]]])
    zeros, large, nan = widened(narrowed(x_TGH, dtype, None), None)
    assert (zeros == 0).all()
    assert nan.isnan().any()
    largest = 1e6 if dtype in HEAD_SCALED else LARGEST[dtype]
    torch.testing.assert_close(large, torch.tensor([[largest, -largest]]))


def test_scales_of_a_layer_leave_headroom() -> None:
    scales_2 = layer_scales(X_TGH, X_TGH * 3, torch.float8_e4m3fn)
    torch.testing.assert_close(scales_2, X_TGH.abs().max() * torch.tensor([2.0, 6.0]) / 448)
    bad = torch.full_like(X_TGH, float("inf"))
    assert layer_scales(X_TGH * 0, bad, torch.float8_e5m2).tolist() == [1.0, 1.0]


def test_other_dtypes_are_only_rounded() -> None:
    assert torch.equal(widened(narrowed(X_TGH, torch.bfloat16, None), None), X_TGH.bfloat16().float())
