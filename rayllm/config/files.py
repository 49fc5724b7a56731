"""Reads the files that options name, so that `resolve` can stay pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayllm.config.model_facts import ModelFacts, generation_defaults
from rayllm.config.registry import Values
from rayllm.errors import ConfigError
from rayllm.kv.prefix import hash_named

WEIGHT_SUFFIXES = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What the files hold that options name."""

    chat_template: str | None = None
    generation_config: Mapping[str, Any] | None = None
    """Sampling parameters under our names. None: the model's own are to be used."""
    weight_bytes: int = 0
    """Size of the weights on disk."""
    log_config: Mapping[str, Any] | None = None


def read_files(values: Values, facts: ModelFacts) -> Files:
    """Read what the options name.

    Raises:
        ConfigError: a file or a package is missing, or holds something else.
        ModelError: a value in the generation config is out of range.
    """
    _check_tokenizer(values["tokenizer"])
    hash_named(values["prefix-caching-hash-algo"])
    return Files(
        chat_template=_chat_template(values["chat-template"]),
        generation_config=_generation_config(values["generation-config"]),
        weight_bytes=_weight_bytes(Path(facts.path)),
        log_config=_log_config(values["log-config-file"]),
    )


def _check_tokenizer(given: str | None) -> None:
    """Refuse at once what cannot be a tokenizer; the rest is told when it is loaded."""
    if given is None or Path(given).is_file() or (Path(given) / "tokenizer.json").is_file():
        return
    reason = "has no tokenizer.json" if Path(given).is_dir() else "does not exist"
    raise ConfigError("--tokenizer", f"{given} {reason}", "name a folder that holds one, or a GGUF file")


def _chat_template(given: str | None) -> str | None:
    if given is None:
        return None
    # A template in one line may be longer than a path can be, which `is_file` answers with an error.
    if "{" not in given and "\n" not in given:
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--chat-template", f"{given}: {error}") from None
    return given


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


def _weight_bytes(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size if path.exists() else 0
    return sum(entry.stat().st_size for entry in path.iterdir() if entry.suffix in WEIGHT_SUFFIXES)
