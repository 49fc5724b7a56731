"""What can be told of a model that will not load, in milliseconds and without torch: asked before Ray is started."""

import json
import struct
from pathlib import Path

from rayllm.config.engine import EngineConfig
from rayllm.config.weight_files import find_weight_files
from rayllm.errors import ModelError
from rayllm.model.families import spec_of

_PREFIX = struct.Struct("<Q")


def check_model(config: EngineConfig) -> None:
    """Refuse a model that engines would refuse later, each with a trace: an unknown family, or files cut short.

    Raises:
        ModelError: names the file.
    """
    spec_of(config.model)
    weights = config.weights
    if config.model.format == "hf" and weights.format != "dummy" and "tensorizer_uri" not in weights.extra:
        try:
            files = find_weight_files(config.model.path, weights.format, weights.ignored).paths
        except ModelError:
            return  # Weights may lie where the engines run.
        for file in files:
            if file.suffix == ".safetensors" and file.is_file():
                _check_length(file)


def _check_length(file: Path) -> None:
    """Compare a safetensors file's length with what its header promises."""
    try:
        with file.open("rb") as stream:
            (header_bytes,) = _PREFIX.unpack(stream.read(_PREFIX.size))
            have = file.stat().st_size
            if header_bytes > have - _PREFIX.size:
                raise ModelError(str(file), "truncated: it ends within its header; fetch it again")
            header = json.loads(stream.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        need = _PREFIX.size + header_bytes + max(ends, default=0)
    except (OSError, ValueError, AttributeError, KeyError, IndexError, TypeError, struct.error) as e:
        raise ModelError(str(file), f"not a safetensors file: {e}; fetch it again") from e
    if have < need:
        raise ModelError(str(file), f"truncated: it has {have} of {need} bytes; fetch it again")
