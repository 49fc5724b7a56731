"""Which files of a model's folder hold its weights, and in which format. Loads no torch."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from rayllm.errors import ModelError

SHARDED_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
"""Files of sharded_state: one rank's share each, perhaps in parts."""
_NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)")
_BELONGS: Mapping[str, Callable[[str], bool]] = {
    "safetensors": lambda name: name.endswith(".safetensors") and not name.startswith(("consolidated", "model-rank-")),
    "mistral": lambda name: fnmatch(name, "consolidated*.safetensors"),
    "pt": lambda name: name.endswith((".bin", ".pt", ".pth")) and not _is_no_weight(name),
    "sharded_state": lambda name: fnmatch(name, "model-rank-*.safetensors"),
    "tensorizer": lambda name: name.endswith(".tensors"),
    "gguf": lambda name: name.endswith(".gguf"),
}
_AUTO = ("safetensors", "mistral", "pt", "sharded_state")
"""In this order, the first that a folder holds."""
_SAME_FILES = {"npcache": "pt", "runai_streamer": "safetensors", "runai_streamer_sharded": "sharded_state"}
_WHOLE = {
    "safetensors": ("model.safetensors.index.json", "model.safetensors"),
    "pt": ("pytorch_model.bin.index.json", "pytorch_model.bin"),
}
"""By format: the index of a model in several files, and the name of one in a single file."""


def _is_no_weight(name: str) -> bool:
    return name.startswith("consolidated") or _NO_WEIGHTS.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The files of one model."""

    format: str
    paths: tuple[Path, ...]
    """In the order to be read."""
    promised: Mapping[str, str] = field(default_factory=dict)
    """By tensor, the file it should be in, where an index says so."""
    origin: str
    """The file or folder to blame for a tensor that is nowhere."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path within the folder fits a pattern, in which `**/` stands for any folders or none."""
    return any(fnmatch(name, form) for pattern in patterns for form in (pattern, pattern.replace("**/", "")))


def weight_names(names: Iterable[str], wanted: str, ignored: Sequence[str] = ()) -> tuple[str, list[str]]:
    """(format, names of the files in it) among the files at the top of a folder. `auto` takes what is there."""
    tops = sorted(name for name in names if "/" not in name and not matches(name, ignored))
    for format_ in _AUTO if wanted == "auto" else (wanted,):
        belongs = _BELONGS[_SAME_FILES.get(format_, format_)]
        if found := [name for name in tops if belongs(name)]:
            return format_, found
    return ("safetensors" if wanted == "auto" else wanted), []


def find_weight_files(path: str, wanted: str = "auto", ignored: Sequence[str] = ()) -> WeightFiles:
    """The files with the weights of the model at `path`: those that an index names, else the one of the usual name,
    else all of the format. Files that match an `ignored` pattern are as good as absent.

    Raises:
        ModelError: there are none, or an index cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        return WeightFiles(format="gguf", paths=(folder,), origin=path)
    format_, names = weight_names((entry.name for entry in folder.iterdir()), wanted, ignored)
    index, single = _WHOLE.get(_SAME_FILES.get(format_, format_), ("", ""))
    if index and (folder / index).is_file() and not matches(index, ignored):
        files = _read_index(folder / index)
        promised = {tensor: str(folder / file) for tensor, file in files.items() if not matches(file, ignored)}
        paths = tuple(sorted({Path(file) for file in promised.values()}))
        return WeightFiles(format=format_, paths=paths, promised=promised, origin=str(folder / index))
    if not names:
        raise ModelError(path, f"holds no weights as {_described(wanted)}; see --load-format and --ignore-patterns")
    if single in names:
        names = [single]
    origin = str(folder / names[0]) if len(names) == 1 else path
    return WeightFiles(format=format_, paths=tuple(folder / name for name in names), origin=origin)


def rank_files(folder: str, pattern: str, rank: int) -> WeightFiles:
    """The files that hold the share of one rank.

    Raises:
        ModelError: there are none.
    """
    glob = pattern.format(rank=rank, part="*")
    paths = tuple(sorted(Path(folder).glob(glob)))
    if not paths:
        raise ModelError(folder, f"holds no {glob}: it was written for fewer ranks, or not as sharded_state")
    return WeightFiles(format="sharded_state", paths=paths, origin=folder)


def _described(wanted: str) -> str:
    if wanted == "auto":
        return "*.safetensors or *.bin"
    return {"safetensors": "*.safetensors", "pt": "*.bin or *.pt", "npcache": "*.bin or *.pt"}.get(wanted, wanted)


def _read_index(index: Path) -> dict[str, str]:
    try:
        promised = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ModelError(str(index), f"cannot be read, or has no weight_map: {e}") from e
    if not isinstance(promised, dict) or not promised or not all(isinstance(v, str) for v in promised.values()):
        raise ModelError(str(index), "weight_map must map names of tensors to names of files")
    return promised
