"""Classes of the user's own, named by options."""

import importlib
from typing import Any, TypeVar

from rayllm.errors import ConfigError

T = TypeVar("T")


def load_attribute(option: str, path: str) -> Any:
    """What `module:name` stands for.

    Raises:
        ConfigError: it cannot be imported; names the option.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs the user's code
        raise ConfigError(
            option, f"cannot load {path!r}: {error}", "give it as module:Class, importable here"
        ) from error


def load_class(option: str, path: str, base: type[T]) -> type[T]:
    """The class `module:name`, a subclass of `base`.

    Raises:
        ConfigError: it cannot be imported, or is none; names the option.
    """
    found = load_attribute(option, path)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(option, f"{path} is no subclass of {base.__module__}.{base.__name__}")
    return found
