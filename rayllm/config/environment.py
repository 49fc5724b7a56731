"""Settings from environment variables, read once, at the entry point. Every one begins with `RLLM_`."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

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

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Environment":
        """Take the settings out of the environment's variables.

        Raises:
            ConfigError: a variable has a bad value, or begins with `RLLM_` and is none of ours.
        """
        known = {PREFIX + f.name.upper(): f for f in fields(cls)}
        values: dict[str, str | float] = {}
        for name, text in variables.items():
            if not name.startswith(PREFIX):
                continue
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise ConfigError(name, "is no variable of rayllm", f"did you mean {near[0]}?" if near else "unset it")
            values[known[name].name] = _seconds(name, text) if name.endswith("_S") else text
        settings = cls(**values)  # type: ignore[arg-type]
        if settings.logging_level.upper() not in LEVELS:
            raise ConfigError("RLLM_LOGGING_LEVEL", f"{settings.logging_level!r} is not one of {', '.join(LEVELS)}")
        return settings


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise ConfigError(name, f"{text!r} is not a number of seconds")
    return seconds
