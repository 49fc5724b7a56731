"""Checkpoints of a Hugging Face folder, as tensors that are read when needed and no further than needed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rayllm.config.weight_files import WeightFiles
from rayllm.config.weights import WeightsConfig
from rayllm.errors import ModelError
from rayllm.model.layers import Stored

_ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes that can be loaded, and their bytes."""
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
_CHUNK = 16 << 20
"""Bytes of a file that are fetched at a time."""


class SizedStored(Stored):
    """A stored tensor that knows the bytes it takes in its file."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a model."""

    tensors: Mapping[str, Any]
    """By name, in the order of the files: `SizedStored`."""
    files: Mapping[str, str]
    """The file each tensor should be in, where an index says so."""
    origin: str
    """The file to blame for a tensor that no index mentions."""
    stream: Callable[[], Iterator[tuple[str, Any]]] | None = field(default=None, kw_only=True)
    """What reads the tensors in an order of its own, each to be used before the next is taken."""

    def file_for(self, name: str) -> str:
        """The file that a missing tensor is missing from."""
        return self.files.get(name, self.origin)


class SafeTensor:
    """One tensor of a safetensors file."""

    def __init__(self, file: str, handle: Any, name: str) -> None:
        self.name, self.file, self._slice = name, file, handle.get_slice(name)
        self.shape = tuple(self._slice.get_shape())
        dtype = self._slice.get_dtype()
        self.kind = dtype
        self.nbytes = torch.Size(self.shape).numel() * _ITEM_SIZES.get(dtype, 1)

    def read_stored(self, rows: slice, columns: slice | None = None) -> Tensor:
        raise AssertionError(f"{self.name} is not quantized")

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        _check_kind(self)
        return self.read_bits(rows, columns)

    def read_bits(self, rows: slice, columns: slice | None = None) -> Tensor:
        """As `read`, of whatever dtype."""
        try:
            if not self.shape:
                return self._slice[...]
            return self._slice[rows] if columns is None else self._slice[rows, columns]
        except SafetensorError as e:
            raise ModelError(self.file, f"cannot be read: {e}", self.name) from e


class LoadedTensor:
    """One tensor that is in memory, or mapped into it."""

    def __init__(self, file: str, name: str, tensor: Tensor) -> None:
        self.name, self.file, self._tensor = name, file, tensor
        self.shape = tuple(tensor.shape)
        self.kind = _KINDS.get(tensor.dtype, str(tensor.dtype))
        self.nbytes = tensor.numel() * tensor.element_size()

    def read_stored(self, rows: slice, columns: slice | None = None) -> Tensor:
        raise AssertionError(f"{self.name} is not quantized")

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        """See `Stored`."""
        _check_kind(self)
        return self.read_bits(rows, columns)

    def read_bits(self, rows: slice, columns: slice | None = None) -> Tensor:
        """As `read`, of whatever dtype."""
        if not self.shape:
            return self._tensor
        return self._tensor[rows] if columns is None else self._tensor[rows, columns]


def is_floating(stored: SizedStored) -> bool:
    """Whether it is of a dtype that can be loaded."""
    return stored.kind in _ITEM_SIZES


def _check_kind(stored: SizedStored) -> None:
    if not is_floating(stored):
        raise ModelError(
            stored.file, f"dtype {stored.kind} is not supported, only {', '.join(_ITEM_SIZES)}", stored.name
        )


def open_safetensors(files: WeightFiles, weights: WeightsConfig) -> Checkpoint:
    """Open safetensors files by the strategy that is wanted.

    Raises:
        ModelError: a file is missing, damaged, or lacks a tensor that the index promises.
    """
    openers = {"lazy": _open_mapped, "eager": _read_whole, "prefetch": _prefetch}
    return gather(files, openers[weights.strategy], weights.threads)


def gather(files: WeightFiles, opener: Callable[[Path], Mapping[str, Any]], threads: int = 1) -> Checkpoint:
    """The tensors of several files together, each opened by `opener`.

    Raises:
        ModelError: a file is missing or damaged, lacks a tensor that the index promises, or repeats one.
    """
    tensors: dict[str, Any] = {}
    for file, opened in zip(files.paths, _opened(files.paths, opener, threads), strict=True):
        for name, tensor in opened.items():
            if name in tensors:
                raise ModelError(str(file), f"is in {Path(tensors[name].file).name} as well", name)
            tensors[name] = tensor
    for name, promised in files.promised.items():
        if name not in tensors:
            index = Path(files.origin).name
            raise ModelError(promised, f"missing, though {index} says that it is there", name)
    return Checkpoint(tensors, files.promised, files.origin)


def _opened(
    paths: Sequence[Path], opener: Callable[[Path], Mapping[str, Any]], threads: int
) -> Iterator[Mapping[str, Any]]:
    for path in paths:
        if not path.is_file():
            raise ModelError(str(path), "missing")
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(opener, paths)


def _open_mapped(file: Path) -> Mapping[str, SafeTensor]:
    try:
        # The handle is kept open by the tensors made from it.
        handle = safe_open(str(file), framework="pt")
        return {name: SafeTensor(str(file), handle, name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise ModelError(str(file), f"not a whole safetensors file, perhaps truncated: {e}") from e


def _read_whole(file: Path) -> Mapping[str, LoadedTensor]:
    try:
        tensors = safetensors.torch.load(file.read_bytes())
    except (SafetensorError, OSError) as e:
        raise ModelError(str(file), f"not a whole safetensors file, perhaps truncated: {e}") from e
    return {name: LoadedTensor(str(file), name, tensor) for name, tensor in tensors.items()}


def _prefetch(file: Path) -> Mapping[str, SafeTensor]:
    """Read a file from start to end, so that the page cache holds what is mapped."""
    with file.open("rb", buffering=0) as data:
        buffer = bytearray(_CHUNK)
        while data.readinto(buffer):
            pass
    return _open_mapped(file)
