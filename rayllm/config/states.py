"""What cannot be honoured is refused, and what has no effect is said, before anything starts."""

from collections.abc import Iterator
from typing import Any

from rayllm.config.hardware import Hardware
from rayllm.config.option import Option, State
from rayllm.config.registry import Registry, Values
from rayllm.config.twins import TWINS
from rayllm.errors import ConfigError


def check_states(values: Values, registry: Registry, hardware: Hardware) -> tuple[str, ...]:
    """Warnings about options without effect on this machine.

    Raises:
        ConfigError: an option asks for what cannot be done.
    """
    warnings = []
    for option in registry:
        if option.name not in values.given or option.state is State.EFFECTIVE:
            continue
        for path, _ in asked(option, values[option.name]):
            if option.state is State.PLANNED or hardware.cuda:
                raise ConfigError(path, "is not supported yet", option.cure or "leave it out")
            if not option.warns:
                raise ConfigError(path, "needs a CUDA GPU, and this machine has none", option.cure or "leave it out")
            warnings.append(f"{path} has no effect: {option.why or 'it is for CUDA GPUs, and this machine has none'}")
    return tuple(warnings)


_TWIN_KEYS = {f"--{many}.{key}" for _, many, key in TWINS}
"""Judged under the options of their own, which are given as well."""


def asked(option: Option, value: Any) -> Iterator[tuple[str, Any]]:
    """(option or key, value) of what is neither the default nor done anyway."""
    if option.keyed:
        for path, part in _differing(option.flag, value, option.default):
            key = path.removeprefix(f"{option.flag}.")
            if path not in _TWIN_KEYS and (key, part) not in option.honoured:
                yield path, part
    elif value is not None and value != option.default and value not in option.honoured:
        yield option.flag, value


def _differing(path: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    for key, part in value.items():
        usual = default.get(key)
        if isinstance(part, dict) and isinstance(usual, dict) and usual:
            yield from _differing(f"{path}.{key}", part, usual)
        elif part is not None and part != usual:
            yield f"{path}.{key}", part
