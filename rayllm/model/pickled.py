"""Files of `torch.save`. They are pickles, of which nothing but tensors is let in; perhaps kept as numpy files then."""

import json
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayllm.config.weight_files import WeightFiles
from rayllm.config.weights import WeightsConfig
from rayllm.errors import ConfigError, ModelError
from rayllm.model.checkpoint import Checkpoint, LoadedTensor, gather

CACHE = "np"
_INDEX = "index.json"


def open_pickled(files: WeightFiles, weights: WeightsConfig) -> Checkpoint:
    """Open files of `torch.save`.

    Raises:
        ModelError: a file is missing or damaged, or holds anything but tensors by name.
        ConfigError: a tensor cannot be put where the map location says.
    """
    return gather(files, partial(_load, map_location=weights.map_location), weights.threads)


def _load(file: Path, map_location: str | Mapping[str, str]) -> Mapping[str, LoadedTensor]:
    place: Any = map_location
    if not isinstance(place, str) and "" in place:
        place = place[""]
    try:
        found = torch.load(file, map_location=place, weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as e:
        reason = str(e).strip().partition("\n")[0]
        raise ModelError(str(file), f"holds more than tensors, or is damaged, and is not read: {reason}") from e
    except (EOFError, OSError, ValueError, KeyError) as e:
        raise ModelError(str(file), f"not a whole file of torch.save: {e}") from e
    except RuntimeError as e:
        if zipfile.is_zipfile(file):
            raise ConfigError("--pt-load-map-location", f"{file} cannot be put on {map_location!r}: {e}") from e
        raise ModelError(str(file), f"not a whole file of torch.save: {e}") from e
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelError(str(file), "does not hold tensors by name")
    return {name: LoadedTensor(str(file), name, tensor) for name, tensor in found.items()}


def open_numpy_cache(folder: str, files: WeightFiles, weights: WeightsConfig) -> Checkpoint:
    """Open the numpy files beside files of `torch.save`; written first where there are none, or old ones.

    Raises:
        ModelError: as `open_pickled`, or the folder cannot be written to.
        ConfigError: as `open_pickled`.
    """
    place, stamp = Path(folder) / CACHE, _stamp(files)
    index = _read_index(place)
    if index.get("made_from") != stamp:
        _write_cache(place, open_pickled(files, weights), stamp)
        index = _read_index(place)
    tensors = {name: _read_array(place / file, name, kind) for name, (file, kind) in index["tensors"].items()}
    return Checkpoint(tensors, {}, str(place))


def _stamp(files: WeightFiles) -> list[list[Any]]:
    """What tells one state of the files from another."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files.paths if path.is_file()]


def _read_index(place: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((place / _INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return index


def _write_cache(place: Path, checkpoint: Checkpoint, stamp: list[list[Any]]) -> None:
    """In a folder of another name first: a start that is cut short, or another engine's, must not be in the way."""
    try:
        work = Path(tempfile.mkdtemp(prefix=f"{CACHE}-", dir=place.parent))
    except OSError as e:
        raise ModelError(str(place.parent), f"cannot be written to, which --load-format npcache needs: {e}") from e
    try:
        tensors = {}
        for number, (name, stored) in enumerate(checkpoint.tensors.items()):
            tensor = stored.read(slice(None)).cpu()
            # numpy has no bfloat16: its bits are kept as integers.
            array = tensor.view(torch.int16) if stored.kind == "BF16" else tensor
            np.save(work / f"{number}.npy", array.numpy())
            tensors[name] = (f"{number}.npy", stored.kind)
        (work / _INDEX).write_text(json.dumps({"made_from": stamp, "tensors": tensors}), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        os.rename(work, place)
    except OSError as e:
        if _read_index(place).get("made_from") != stamp:
            raise ModelError(str(place), f"cannot be written: {e}") from e
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read_array(file: Path, name: str, kind: str) -> LoadedTensor:
    try:
        # Copy on write, because torch warns of memory that it must not write to.
        tensor = torch.from_numpy(np.load(file, mmap_mode="c"))
    except (OSError, ValueError) as e:
        raise ModelError(str(file), f"cannot be read: {e}; remove the folder", name) from e
    return LoadedTensor(str(file), name, tensor.view(torch.bfloat16) if kind == "BF16" else tensor)
