"""Weights of `fbgemm_fp8`: 8-bit floating-point matrices with a scale for each row, turned back as they are read.

The scheme rounds activations to 8 bits too, on GPUs that multiply these; here products are of the model's dtype.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from rayllm.errors import ModelError
from rayllm.model.checkpoint import Checkpoint

_SCALE = "_scale"
"""What the name of a matrix's scales ends with, beside the matrix's own."""


class ScaledTensor:
    """A matrix of 8-bit numbers and the scales of its rows, as one of float32."""

    kind = "F32"

    def __init__(self, stored: Any, scales: Any) -> None:
        self.name, self.file, self.shape, self.nbytes = stored.name, stored.file, stored.shape, stored.nbytes
        self._stored, self._scales = stored, scales

    def read_stored(self, rows: slice, columns: slice | None = None) -> Tensor:
        raise AssertionError(f"{self.name} is read in full only")

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        """See `Stored`."""
        scales = self._scales.read(rows).float().view(-1, 1)
        return self._stored.read_bits(rows, columns).float() * scales


def scaled(checkpoint: Checkpoint) -> Checkpoint:
    """The same tensors with scales applied, for the loader to read like any others.

    Raises:
        ModelError: a matrix of 8-bit numbers lacks its scales, or they are not one for each row.
    """
    tensors = dict(checkpoint.tensors)
    for name, stored in checkpoint.tensors.items():
        if stored.kind != "F8_E4M3":
            continue
        scales = tensors.pop(name + _SCALE, None)
        if scales is None:
            raise ModelError(checkpoint.file_for(name + _SCALE), "missing", name + _SCALE)
        if scales.shape not in ((stored.shape[0], 1), (stored.shape[0],)):
            raise ModelError(scales.file, f"shape {list(scales.shape)}, where rows are {stored.shape[0]}", scales.name)
        tensors[name] = ScaledTensor(stored, scales)
    return replace(checkpoint, tensors=tensors)
