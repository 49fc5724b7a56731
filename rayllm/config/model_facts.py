"""What a model's files say about it, read without torch: sizes, limits, end tokens, generation defaults."""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayllm.config.gguf_config import config_of
from rayllm.config.gguf_file import GgufFile, read_gguf
from rayllm.config.hf_config import DEFAULTS, flatten, max_model_len
from rayllm.config.mistral_config import config_of as mistral_config
from rayllm.errors import ConfigError, ModelError

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DEFAULT_LENGTH = 2048
"""Context of a model whose config states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Plain facts about one model.

    `config` holds values under Hugging Face's names (`hidden_size`, `num_attention_heads`, ...), whatever the file
    format; nested text configs are flattened.
    """

    path: str
    """A model folder, or one GGUF file."""
    config_file: str | None = None
    """Where the config is read from, if that is not config.json in the folder."""
    format: str
    """`hf` or `gguf`."""
    architecture: str
    """As Hugging Face names it, such as `LlamaForCausalLM`."""
    config: Mapping[str, Any]
    vocab_size: int
    max_model_len: int
    """Longest context in tokens that the position encoding allows."""
    dtype: str
    """`float32`, `bfloat16` or `float16`, as stored."""
    eos_token_ids: tuple[int, ...] = ()
    """Every end token, of the model's config and of its generation config."""
    bos_token_id: int | None = None
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the model's generation config sets, under our names."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values of the config that an option changed."""
    windows: bool = True
    """Whether layers keep their sliding windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """How a model's config is read."""

    path: str | None = None
    """A folder with the config, or its file, if that is not the model's folder."""
    format: str = "auto"
    """`hf` (config.json), `mistral` (params.json), or `auto`: the first of them that is there."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values that go over those of the config."""
    trusted: bool = False
    """Whether a config that code of its own would complete is taken as it stands."""


def read_model_facts(path: str, source: ConfigSource | None = None) -> ModelFacts:
    """Read the facts of the model at `path`, a Hugging Face folder or a GGUF file.

    Raises:
        ModelError: nothing is there, or a file is damaged; names the file.
        ConfigError: an option about the config cannot be honoured for this model.
    """
    source, place = source or ConfigSource(), Path(path)
    if place.is_dir():
        return _read_folder(place, source)
    if place.is_file():
        return _read_gguf(path, source)
    raise ModelError(
        path,
        "no such file or folder; give a model folder with a config.json, a .gguf file, or a name on the hub such as "
        "Qwen/Qwen3-0.6B",
    )


def _read_folder(folder: Path, source: ConfigSource) -> ModelFacts:
    file = _config_file(folder, source)
    ggufs = sorted(folder.glob("*.gguf"))
    if source.path is not None and not file.is_file():
        raise ConfigError("--hf-config-path", f"{file} does not exist", "name a folder that holds a config.json")
    if not file.is_file() and len(ggufs) == 1 and source.format == "auto":
        return _read_gguf(str(ggufs[0]), source)
    if not file.is_file():
        other = ", and the folder does not hold exactly one .gguf file either" if source.format == "auto" else ""
        raise ModelError(str(file), f"missing{other}")
    raw = _read_json(file)
    try:
        config = flatten(mistral_config(raw) if file.name == "params.json" else raw, source.overrides)
    except ValueError as e:
        raise ModelError(str(file), str(e)) from e
    _check_own_code(config, file, source)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(str(file), "architectures: missing; it must name the model's class")
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ModelError(str(file), f"vocab_size: must be a positive integer, not {vocab_size!r}")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    ends = [
        *_token_ids(config.get("eos_token_id"), "eos_token_id", vocab_size, file),
        *_token_ids(generation.get("eos_token_id"), "eos_token_id", vocab_size, generation_file),
    ]
    begins = _token_ids(config.get("bos_token_id"), "bos_token_id", vocab_size, file)
    return ModelFacts(
        path=str(folder),
        config_file=str(file),
        format="hf",
        overrides=source.overrides,
        architecture=architectures[0],
        config=config,
        vocab_size=vocab_size,
        max_model_len=_length(config, file),
        dtype=_folder_dtype(folder, config, file),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=begins[0] if begins else None,
        generation_defaults=generation_defaults(generation, generation_file),
    )


def _config_file(folder: Path, source: ConfigSource) -> Path:
    """The file that holds the config, or should."""
    place = Path(source.path) if source.path is not None else folder
    if place.is_file():
        return place
    if source.format == "mistral" or (
        source.format == "auto" and not (place / "config.json").is_file() and (place / "params.json").is_file()
    ):
        return place / "params.json"
    return place / "config.json"


def _check_own_code(config: Mapping[str, Any], file: Path, source: ConfigSource) -> None:
    """Refuse a config that means what its own code says, unless the user takes it as it stands."""
    own = config.get("auto_map")
    code = own.get("AutoConfig") if isinstance(own, Mapping) else None
    if code and config.get("model_type") not in DEFAULTS and not source.trusted:
        raise ConfigError(
            "--trust-remote-code",
            f"{file} is completed by code of its own, {code}",
            "give the option if you trust it",
        )


def _read_gguf(path: str, source: ConfigSource) -> ModelFacts:
    for option, given in (("--hf-config-path", source.path), ("--config-format", source.format != "auto")):
        if given:
            raise ConfigError(option, f"{path} is a GGUF file, which holds its own config", "leave it out")
    gguf = read_gguf(path, arrays=False)
    architecture, config = config_of(gguf, source.overrides)
    file, vocab_size = Path(gguf.path), config["vocab_size"]
    ends: list[int] = []
    for kind in ("eos", "eot", "eom"):
        name = f"tokenizer.ggml.{kind}_token_id"
        ends += _token_ids(gguf.metadata.get(name), name, vocab_size, file)
    begin_name = "tokenizer.ggml.bos_token_id"
    begins = _token_ids(gguf.metadata.get(begin_name), begin_name, vocab_size, file)
    sampling = {
        ours: gguf.metadata.get(f"general.sampling.{theirs}")
        for theirs, ours in (
            ("temp", "temperature"),
            ("top_k", "top_k"),
            ("top_p", "top_p"),
            ("min_p", "min_p"),
            ("penalty_repeat", "repetition_penalty"),
        )
    }
    return ModelFacts(
        path=gguf.path,
        format="gguf",
        overrides=source.overrides,
        architecture=architecture,
        config=config,
        vocab_size=vocab_size,
        max_model_len=_length(config, file),
        dtype=_gguf_dtype(gguf),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=begins[0] if begins else None,
        generation_defaults=generation_defaults(sampling, file),
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(str(file), f"cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(str(file), "must hold a JSON object")
    return value


def _token_ids(value: Any, name: str, vocab_size: int, file: Path) -> list[int]:
    """One id, a list of them, or none, checked against the vocabulary."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    for one in values:
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < vocab_size:
            raise ModelError(str(file), f"{name}: token id {one!r} is outside the vocabulary of {vocab_size} tokens")
    return values


def _length(config: Mapping[str, Any], file: Path) -> int:
    length = max_model_len(config)
    if length is not None and length < 1:
        raise ModelError(str(file), f"the context length must be positive, not {length}")
    return length or _DEFAULT_LENGTH


_DEFAULTS_RANGES: Mapping[str, tuple[str, type, float, float]] = {
    "temperature": ("temperature", float, 0.0, float("inf")),
    "top_k": ("top_k", int, -1, float("inf")),
    "top_p": ("top_p", float, 0.0, 1.0),
    "min_p": ("min_p", float, 0.0, 1.0),
    "repetition_penalty": ("repetition_penalty", float, 0.0, float("inf")),
    "max_new_tokens": ("max_tokens", int, 1, float("inf")),
}
"""Names in a generation config: ours, the type, least and greatest value."""
_NEVER_ZERO = ("top_p", "repetition_penalty")


def generation_defaults(generation: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Sampling parameters that a generation config sets, under our names. Those that set nothing are left out.

    Raises:
        ModelError: one is out of range; names `file`.
    """
    found: dict[str, Any] = {}
    for name, (ours, kind, least, most) in _DEFAULTS_RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        allowed = int if kind is int else (int, float)
        if not isinstance(value, allowed) or isinstance(value, bool) or not least <= value <= most:
            raise ModelError(str(file), f"{name}: {value!r} is not a value between {least} and {most}")
        if value == 0 and name in _NEVER_ZERO:
            raise ModelError(str(file), f"{name}: must not be 0")
        found[ours] = max(value, 0) if name == "top_k" else kind(value)
    return found


def _folder_dtype(folder: Path, config: Mapping[str, Any], file: Path) -> str:
    """As the config says, else as most bytes of the first weight file are stored."""
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated is not None:
        name = str(stated).removeprefix("torch.")
        if name not in _DTYPES.values():
            raise ModelError(str(file), f"dtype: {stated!r} is not supported, only {', '.join(_DTYPES.values())}")
        return name
    weights = sorted(folder.glob("*.safetensors"))
    return _most_bytes(_safetensors_sizes(weights[0])) if weights else "float32"


def _safetensors_sizes(file: Path) -> Iterable[tuple[str, int]]:
    """(dtype, bytes) of each tensor, from the header; nothing if that is damaged, which loading will tell."""
    try:
        with file.open("rb") as data:
            (size,) = struct.unpack("<Q", data.read(8))
            header = json.loads(data.read(min(size, 100_000_000)))
        return [
            (entry["dtype"], entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return []


def _gguf_dtype(gguf: GgufFile) -> str:
    return _most_bytes((info.type, info.nbytes) for info in gguf.tensors.values())


def _most_bytes(sizes: Iterable[tuple[str, int]]) -> str:
    """The dtype that most bytes are in. Quantized values are taken for bfloat16, whose range holds them all."""
    total: dict[str, int] = {}
    for name, size in sizes:
        total[name] = total.get(name, 0) + size
    return _DTYPES.get(max(total, key=lambda name: total[name]), "bfloat16") if total else "float32"
