"""Safetensors files of a Hugging Face folder, as tensors that are read when needed and no further than needed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rayllm.errors import ModelError
from rayllm.model.layers import Stored

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes that can be loaded, and their bytes."""


class SizedStored(Stored):
    """A stored tensor that knows the bytes it takes in its file."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a model."""

    tensors: Mapping[str, Any]
    """By name: `SizedStored`."""
    files: Mapping[str, str]
    """The file each tensor should be in, where an index says so."""
    origin: str
    """The file to blame for a tensor that no index mentions."""

    def file_for(self, name: str) -> str:
        """The file that a missing tensor is missing from."""
        return self.files.get(name, self.origin)


class SafeTensor:
    """One tensor of a safetensors file."""

    def __init__(self, file: str, handle: Any, name: str) -> None:
        self.name, self.file, self._slice = name, file, handle.get_slice(name)
        self.shape = tuple(self._slice.get_shape())
        dtype = self._slice.get_dtype()
        if dtype not in _ITEM_SIZES:
            raise ModelError(file, f"dtype {dtype} is not supported, only {', '.join(_ITEM_SIZES)}", name)
        self.kind = dtype
        self.nbytes = torch.Size(self.shape).numel() * _ITEM_SIZES[dtype]

    def read_stored(self, rows: slice) -> Tensor:
        raise AssertionError(f"{self.name} is not quantized")

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        try:
            return self._slice[rows] if columns is None else self._slice[rows, columns]
        except SafetensorError as e:
            raise ModelError(self.file, f"cannot be read: {e}", self.name) from e


def open_folder(path: str) -> Checkpoint:
    """Open the weights of a folder: the files that its index names, else its one file, else all that look like parts.

    Raises:
        ModelError: there are none, or a file is missing, damaged, or lacks a tensor that the index promises.
    """
    folder = Path(path)
    index = folder / _INDEX
    if index.is_file():
        promised = _read_index(index)
        files = sorted({folder / name for name in promised.values()})
        origin = index
    else:
        promised = {}
        files = [folder / _SINGLE]
        if not files[0].is_file():
            files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
        origin = files[0] if len(files) == 1 else folder
    if not files:
        raise ModelError(path, "holds no *.safetensors files; other formats of weights are not supported")
    tensors: dict[str, SafeTensor] = {}
    for file in files:
        for name, tensor in _open_file(file).items():
            if name in tensors:
                raise ModelError(str(file), f"is in {Path(tensors[name].file).name} as well", name)
            tensors[name] = tensor
    for name, file_name in promised.items():
        if name not in tensors:
            raise ModelError(str(folder / file_name), f"missing, though {_INDEX} says that it is there", name)
    return Checkpoint(tensors, {name: str(folder / file) for name, file in promised.items()}, str(origin))


def _read_index(index: Path) -> dict[str, str]:
    try:
        promised = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ModelError(str(index), f"cannot be read, or has no weight_map: {e}") from e
    if not isinstance(promised, dict) or not promised or not all(isinstance(v, str) for v in promised.values()):
        raise ModelError(str(index), "weight_map must map names of tensors to names of files")
    return promised


def _open_file(file: Path) -> dict[str, SafeTensor]:
    if not file.is_file():
        raise ModelError(str(file), "missing")
    try:
        # The handle is kept open by the tensors made from it.
        handle = safe_open(str(file), framework="pt")
        return {name: SafeTensor(str(file), handle, name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise ModelError(str(file), f"not a whole safetensors file, perhaps truncated: {e}") from e
