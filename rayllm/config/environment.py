"""Settings from environment variables, read once, at the entry point. Every one begins with `RLLM_`."""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from rayllm.errors import ConfigError

PREFIX = "RLLM_"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The variables that rayllm reads, each as `RLLM_` and the field's name in capitals."""

    logging_level: str = "INFO"
    api_key: str | None = field(default=None, repr=False)
    """Stands in for `--api-key`, so that the key is not in the process list."""
    step_limit_s: float = 300.0
    """A step that runs longer means a hung engine, which is replaced."""
    replica_wait_s: float = 60.0
    """How long a request whose engine is gone waits for another."""
    server_dev_mode: bool = False
    """`1` serves what only developers should have: `/collective_rpc`, `/pause`, `/reset_prefix_cache` and so on."""

    cluster_secret: str = field(default="", repr=False)
    """With `--nnodes`, the same on every node: no one else can take a worker's place."""
    worker_resources: tuple[tuple[str, float], ...] = ()
    """What each worker asks of its Ray node, as JSON: `{"CPU": 4, "special": 1}`. A GPU or CPU is added where it names
    neither."""
    worker_labels: tuple[tuple[str, str], ...] = ()
    """Labels of the Ray nodes where workers may run, as JSON: `{"accelerator-type": "H100"}`."""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Environment":
        """Take the settings out of the environment's variables.

        Raises:
            ConfigError: a variable has a bad value.
        """
        known = _known()
        readers: dict[Any, Callable[[str, str], Any]] = {
            float: _seconds, bool: _switch,
            tuple[tuple[str, float], ...]: _amounts, tuple[tuple[str, str], ...]: _labels,
        }  # fmt: skip
        values: dict[str, Any] = {}
        for name, text in variables.items():
            if name in known:
                read = readers.get(known[name].type)
                values[known[name].name] = text if read is None else read(name, text)
        settings = cls(**values)
        if settings.logging_level.upper() not in LEVELS:
            raise ConfigError("RLLM_LOGGING_LEVEL", f"{settings.logging_level!r} is not one of {', '.join(LEVELS)}")
        return settings


def check_names(variables: Mapping[str, str], fail: bool) -> tuple[str, ...]:
    """Warnings about variables that begin with `RLLM_` and are none of ours.

    Raises:
        ConfigError: there is one, and `fail` is set.
    """
    known = _known()
    warnings = []
    for name in sorted(variables):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            error = ConfigError(name, "is no variable of rayllm", f"did you mean {near[0]}?" if near else "unset it")
            if fail:
                raise error
            warnings.append(f"{error} (ignored)")
    return tuple(warnings)


def _known() -> "dict[str, Field[Any]]":
    return {PREFIX + f.name.upper(): f for f in fields(Environment)}


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(name, f"{text!r} is neither 0 nor 1")
    return text == "1"


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise ConfigError(name, f"{text!r} is not a number of seconds")
    return seconds


def _object(name: str, text: str, kinds: type | tuple[type, ...], what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(name, f"is no JSON: {error}") from None
    if not isinstance(value, dict) or not all(isinstance(v, kinds) and not isinstance(v, bool) for v in value.values()):
        raise ConfigError(name, f"{text!r} is no JSON object of names and {what}")
    return value


def _amounts(name: str, text: str) -> tuple[tuple[str, float], ...]:
    values = _object(name, text, (int, float), "amounts")
    if bad := [key for key, amount in values.items() if not 0 < amount < 1e9]:
        raise ConfigError(name, f"{bad[0]}: {values[bad[0]]} is no amount")
    return tuple((key, float(amount)) for key, amount in values.items())


def _labels(name: str, text: str) -> tuple[tuple[str, str], ...]:
    return tuple(_object(name, text, str, "texts").items())
