"""Reads the files that options name, so that `resolve` can stay pure."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayllm.config.hub import Places
from rayllm.config.model_facts import ModelFacts, generation_defaults
from rayllm.config.registry import Values
from rayllm.config.weight_files import find_weight_files
from rayllm.errors import ConfigError, ModelError
from rayllm.kv.prefix import hash_named
from rayllm.parsers.registry import load_plugin, reasoning_parsers, tool_parsers

NETWORK_FILE_SYSTEMS = (
    "nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "glusterfs", "fuse.glusterfs", "beegfs", "gpfs", "9p", "afs",
    "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs",
)  # fmt: skip
MOUNTS = Path("/proc/self/mounts")
PACKAGES = {
    "tensorizer": ("tensorizer", "tensorizer"),
    "runai_streamer": ("runai_model_streamer", "runai-model-streamer"),
    "runai_streamer_sharded": ("runai_model_streamer", "runai-model-streamer"),
}
"""By --load-format, the module that reads it and the package that brings it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What the files hold that options name."""

    chat_template: str | None = None
    chat_template_name: str | None = None
    """The template's name among those of the tokenizer, where no text is given."""
    generation_config: Mapping[str, Any] | None = None
    """Sampling parameters under our names. None: the model's own are to be used."""
    tokenizer: str | None = None
    """Where it lies, if that is not the model's folder."""
    code: str | None = None
    """Where modelling code of the model's own lies that may be run."""
    weight_format: str = "safetensors"
    """What `auto` finds in the model's folder."""
    weight_bytes: int = 0
    """Size of the weights on disk."""
    log_config: Mapping[str, Any] | None = None
    network_file_system: str | None = None
    """The kind of network file system that the model lies on."""
    tool_parser_plugin: str | None = None
    """Where it lies."""
    tool_parsers: tuple[str, ...] = ()
    """All names of tool parsers, those of the plugin among them, where an option gives one."""
    reasoning_parser_plugin: str | None = None
    reasoning_parsers: tuple[str, ...] = ()


def read_files(values: Values, facts: ModelFacts, places: Places | None = None, mounts: Path = MOUNTS) -> Files:
    """Read what the options name. `mounts` is the table of mounted file systems.

    Raises:
        ConfigError: a file or a package is missing, or holds something else.
        ModelError: a value in the generation config is out of range.
    """
    tokenizer = places.tokenizer if places is not None else values["tokenizer"]
    _check_tokenizer(tokenizer)
    hash_named(values["prefix-caching-hash-algo"])
    _check_package(values["load-format"])
    format_, size = _weights(facts, values)
    template, template_name = _chat_template(values["chat-template"])
    for option in ("tool-parser-plugin", "reasoning-parser-plugin"):
        if values[option]:
            load_plugin(f"--{option}", values[option])
    return Files(
        tool_parser_plugin=_absolute(values["tool-parser-plugin"]),
        tool_parsers=tuple(sorted(tool_parsers())) if values["tool-call-parser"] else (),
        reasoning_parser_plugin=_absolute(values["reasoning-parser-plugin"]),
        reasoning_parsers=tuple(sorted(reasoning_parsers())) if values["reasoning-parser"] else (),
        tokenizer=tokenizer,
        code=places.code if places is not None else None,
        weight_format=format_,
        weight_bytes=size,
        network_file_system=_network_file_system(Path(facts.path), mounts),
        chat_template=template,
        chat_template_name=template_name,
        generation_config=_generation_config(values["generation-config"]),
        log_config=_log_config(values["log-config-file"]),
    )


def _absolute(path: str) -> str | None:
    return str(Path(path).resolve()) if path else None


def _check_tokenizer(given: str | None) -> None:
    """Refuse at once what cannot be a tokenizer; the rest is told when it is loaded."""
    if given is None or Path(given).is_file() or (Path(given) / "tokenizer.json").is_file():
        return
    reason = "has no tokenizer.json" if Path(given).is_dir() else "does not exist"
    raise ConfigError("--tokenizer", f"{given} {reason}", "name a folder that holds one, or a GGUF file")


def _chat_template(given: str | None) -> tuple[str | None, str | None]:
    """(text, name): one of them, as a file, a template or a name is given."""
    if given is None:
        return None, None
    # A template in one line may be longer than a path can be, which `is_file` answers with an error.
    if "{" not in given and "\n" not in given:
        try:
            if "/" not in given and not Path(given).exists():
                return None, given
            return Path(given).read_text(encoding="utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            cure = "give the path of a file, the template itself, or the name of one of the model's"
            raise ConfigError("--chat-template", f"{given[:200]}: {reason}", cure) from None
    return given, None


def _generation_config(given: str) -> Mapping[str, Any] | None:
    if given == "auto":
        return None
    if given == "vllm":
        return {}
    path = Path(given) / "generation_config.json"
    return generation_defaults(_json_object("--generation-config", path), path)


def _log_config(given: str | None) -> Mapping[str, Any] | None:
    return None if given is None else _json_object("--log-config-file", Path(given))


def _json_object(option: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(option, f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(option, f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(option, f"{path} holds no JSON object")
    return content


def _check_package(load_format: str) -> None:
    module, package = PACKAGES.get(load_format, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise ConfigError("--load-format", f"{load_format} needs the package {package}", f"pip install {package}")


def _weights(facts: ModelFacts, values: Values) -> tuple[str, int]:
    """(format, bytes) of the weights; that there are none is for the loader to say."""
    wanted = values["load-format"]
    try:
        found = find_weight_files(facts.path, "auto" if wanted == "dummy" else wanted, values["ignore-patterns"])
        return found.format, sum(path.stat().st_size for path in found.paths)
    except (ModelError, OSError):
        return "safetensors", 0


def _network_file_system(path: Path, mounts: Path) -> str | None:
    """The kind of the network file system that holds a path, None if it is a local one."""
    try:
        table = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return None
    place = path.resolve()
    holding = [(fields[1], fields[2]) for fields in table if len(fields) > 2 and place.is_relative_to(fields[1])]
    kind = max(holding, key=lambda entry: len(entry[0]), default=("", ""))[1]
    return kind if kind in NETWORK_FILE_SYSTEMS else None
