"""8-bit floating-point matrices, turned back as they are read: of `fbgemm_fp8`, with a scale for each row, and of `fp8`
with one for each block, as DeepSeek-V3 is published.

The schemes round activations to 8 bits too, on GPUs that multiply these; here products are of the model's dtype.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from rayllm.errors import ModelError
from rayllm.model.checkpoint import Checkpoint

_SCALE = "_scale"
_BLOCK_SCALE = "_scale_inv"
"""What the name of a matrix's scales ends with, beside the matrix's own: those of rows, and of blocks."""


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


class BlockScaledTensor(ScaledTensor):
    """A matrix of 8-bit numbers and the scales of its blocks, as one of float32."""

    def __init__(self, stored: Any, scales: Any, block: tuple[int, int]) -> None:
        super().__init__(stored, scales)
        self._block = block

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        """See `Stored`."""
        bounds = [part.indices(size)[:2] for part, size in zip((rows, columns or slice(None)), self.shape, strict=True)]
        whole = [slice(begin // size, -(-end // size)) for (begin, end), size in zip(bounds, self._block, strict=True)]
        scales = self._scales.read(*whole).float()
        for dim, ((begin, end), size) in enumerate(zip(bounds, self._block, strict=True)):
            scales = scales.repeat_interleave(size, dim).narrow(dim, begin % size, end - begin)
        return self._stored.read_bits(rows, columns).float() * scales


def block_scaled(checkpoint: Checkpoint, block: tuple[int, int]) -> Checkpoint:
    """The same tensors with scales of blocks applied, for the loader to read like any others.

    Raises:
        ModelError: a matrix of 8-bit numbers lacks its scales, or they are not one for each block.
    """
    tensors = dict(checkpoint.tensors)
    for name, stored in checkpoint.tensors.items():
        if stored.kind != "F8_E4M3":
            continue
        scales = _scales_of(tensors, name + _BLOCK_SCALE, checkpoint)
        wanted = tuple(-(-have // size) for have, size in zip(stored.shape, block, strict=False))
        if len(stored.shape) != 2 or scales.shape != wanted:
            raise ModelError(scales.file, f"shape {list(scales.shape)}, where blocks are {list(wanted)}", scales.name)
        tensors[name] = BlockScaledTensor(stored, scales, block)
    return replace(checkpoint, tensors=tensors)


def _scales_of(tensors: dict[str, Any], name: str, checkpoint: Checkpoint) -> Any:
    """The tensor of that name, which is taken away."""
    scales = tensors.pop(name, None)
    if scales is None:
        raise ModelError(checkpoint.file_for(name), "missing", name)
    return scales


def scaled(checkpoint: Checkpoint) -> Checkpoint:
    """The same tensors with scales applied, for the loader to read like any others.

    Raises:
        ModelError: a matrix of 8-bit numbers lacks its scales, or they are not one for each row.
    """
    tensors = dict(checkpoint.tensors)
    for name, stored in checkpoint.tensors.items():
        if stored.kind != "F8_E4M3":
            continue
        scales = _scales_of(tensors, name + _SCALE, checkpoint)
        if scales.shape not in ((stored.shape[0], 1), (stored.shape[0],)):
            raise ModelError(scales.file, f"shape {list(scales.shape)}, where rows are {stored.shape[0]}", scales.name)
        tensors[name] = ScaledTensor(stored, scales)
    return replace(checkpoint, tensors=tensors)
