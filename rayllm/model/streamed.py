"""Weights that other packages read: Run:ai's streamer of safetensors, and CoreWeave's tensorizer."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayllm.config.weight_files import WeightFiles
from rayllm.config.weights import WeightsConfig
from rayllm.errors import ModelError
from rayllm.model.checkpoint import Checkpoint, LoadedTensor, open_safetensors


def open_streamed(files: WeightFiles, weights: WeightsConfig) -> Checkpoint:
    """Safetensors files whose headers are read here and whose tensors `runai_model_streamer` brings.

    Raises:
        ModelError: a file is missing or damaged.
    """
    checkpoint = open_safetensors(files, weights)

    def stream() -> Iterator[tuple[str, Any]]:
        # The library has no other way to be told.
        os.environ.update({f"RUNAI_STREAMER_{name.upper()}": str(value) for name, value in weights.extra.items()})
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in files.paths], owned=False)
            for name, tensor in streamer.get_tensors():
                yield name, LoadedTensor(checkpoint.tensors[name].file, name, tensor)

    return replace(checkpoint, stream=stream)


def open_tensorized(files: WeightFiles, weights: WeightsConfig) -> Checkpoint:
    """A file that tensorizer wrote of a Hugging Face model.

    Raises:
        ModelError: the file is missing or damaged.
    """
    from tensorizer import TensorDeserializer

    path = Path(weights.extra.get("tensorizer_uri") or files.paths[0])
    try:
        found = TensorDeserializer(str(path), device="cpu")
        tensors = {name: LoadedTensor(str(path), name, found[name]) for name in found}
    except (OSError, ValueError) as e:
        raise ModelError(str(path), f"not a file of tensorizer: {e}") from e
    return Checkpoint(tensors, {}, str(path))
