"""Settings from environment variables, read once, at the entry point. Every one begins with `RLLM_`."""

import difflib
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

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Environment":
        """Take the settings out of the environment's variables.

        Raises:
            ConfigError: a variable has a bad value.
        """
        known = _known()
        readers: dict[Any, Callable[[str, str], Any]] = {float: _seconds, bool: _switch}
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
