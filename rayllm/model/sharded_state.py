"""Checkpoints of finished shares: each rank's own parameters under their own names, so that it reads nothing else.

    python -m rayllm.model.sharded_state MODEL OUT [options of rayllm serve]

writes one, in the dtype and for the ranks that the options say; `--load-format sharded_state` reads it.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from rayllm.config.engine import EngineConfig
from rayllm.config.load import load
from rayllm.config.model_impl import OWN
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.weight_files import matches
from rayllm.errors import ConfigError, RayLLMError
from rayllm.model.loader import kv_scales_of, load_model, own_parameters
from rayllm.parallel.group import SingleGroup
from rayllm.parallel.ranks import Ranks

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


@dataclass(frozen=True)
class Share(SingleGroup):
    """One rank of a group that does not meet: enough to load its share."""

    rank: int
    size: int


def save_sharded_state(engine: EngineConfig, folder: Path) -> list[Path]:
    """Write the share of every rank of a model to a folder, with all else that the model's folder holds.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: the ranks cannot divide it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source, written = Path(engine.model.path), []
    for file in source.iterdir():
        if file.is_file() and not matches(file.name, _WEIGHTS):
            shutil.copy(file, folder / file.name)
    for rank in range(engine.parallel.tensor):
        ranks = Ranks(Share(rank, engine.parallel.tensor))
        model = load_model(
            engine.model, getattr(torch, engine.dtype), torch.device("cpu"), ranks, engine.weights,
            max_model_len=engine.max_model_len,
        )  # fmt: skip
        path = folder / engine.weights.pattern.format(rank=rank, part=0)
        save_file({**dict(own_parameters(model)), **dict(kv_scales_of(model))}, path, metadata={"format": "pt"})
        written.append(path)
    return written


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status."""
    if len(arguments) < 2 or arguments[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    model, out, *options = arguments
    try:
        engine = load(parse_arguments([model, *options], registry())).engine
        if engine.model.format == "gguf":
            raise ConfigError("--model", f"{model} is a GGUF file, which needs no other form", "serve it as it is")
        if engine.model_impl != OWN:
            raise ConfigError("--model-impl", "shares are of rayllm's own implementation", "serve the model as it is")
        for path in save_sharded_state(engine, Path(out)):
            print(path)
    except RayLLMError as error:
        print(f"rayllm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
