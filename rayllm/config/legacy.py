"""Options of older releases: what became of each, so that an old command line still means what it meant."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rayllm.config.option import Option
from rayllm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Legacy:
    """An option that is gone. One of the following says what became of it; none means that it has no effect."""

    option: Option
    becomes: Callable[[Any], Mapping[str, Any]] | None = None
    """From its value to values of today's options; an inner mapping sets keys of an option that holds many."""
    refused: str = ""
    """Why it cannot be honoured."""
    note: str = ""
    """More to say where it has no effect."""


def modernize(given: Mapping[str, Any], legacy: Mapping[str, Legacy]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The given values in today's options, and a note for each option that is gone.

    Raises:
        ConfigError: such an option cannot be honoured, or contradicts a value given for its successor.
    """
    modern = {name: value for name, value in given.items() if name not in legacy}
    notes = []
    for name, value in given.items():
        if name not in legacy:
            continue
        old = legacy[name]
        if old.refused:
            raise ConfigError(f"--{name}", old.refused, "leave it out")
        if old.becomes is None:
            notes.append(f"--{name} is deprecated and has no effect" + (f": {old.note}" if old.note else ""))
            continue
        successors = old.becomes(value)
        for successor, new in successors.items():
            _put(modern, f"--{name}", successor, new)
        notes.append(f"--{name} is deprecated: it stands for {_written(successors)}")
    return modern, tuple(notes)


def _put(modern: dict[str, Any], old: str, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        merged = dict(modern.get(name) or {})
        for key, part in value.items():
            if key in merged and merged[key] != part:
                raise ConfigError(old, f"contradicts --{name}.{key}", "give one of them")
            merged[key] = part
        modern[name] = merged
        return
    if name in modern and modern[name] != value:
        raise ConfigError(old, f"contradicts --{name}", "give one of them")
    modern[name] = value


def _written(values: Mapping[str, Any]) -> str:
    """As a command line would say it."""
    return " ".join(part for name, value in values.items() for part in _words(f"--{name}", value, top=True))


def _words(path: str, value: Any, top: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _words(f"{path}.{key}", part)
    elif top and isinstance(value, bool):
        yield path if value else path.replace("--", "--no-", 1)
    elif top and isinstance(value, list):
        yield f"{path} {' '.join(map(str, value))}"
    else:
        yield f"{path} {value if isinstance(value, str) else json.dumps(value)}"
