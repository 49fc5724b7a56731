"""Classes of the user's own, named by options."""

import importlib
import importlib.util
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any, TypeVar

from rayllm.config.engine import EngineConfig
from rayllm.errors import ConfigError

T = TypeVar("T")


def check_plugins(config: EngineConfig) -> None:
    """Look for the modules of an engine's own classes, before anything slow is started. Imports none of them.

    Raises:
        ConfigError: one is not there; names the option.
    """
    named = [("--logits-processors", path) for path in config.logits_processors] + [
        ("--scheduler-cls", config.scheduler_cls),
        ("--worker-cls", config.worker_cls),
        ("--worker-extension-cls", config.worker_extension_cls),
    ]
    for option, path in named:
        if path is not None and not _is_there(module := path.partition(":")[0]):
            raise ConfigError(
                option, f"there is no module {module!r}", "correct it, or have the folder that holds it in PYTHONPATH"
            )


def _is_there(module: str) -> bool:
    """Whether a module can be found. Unlike `find_spec` of a dotted name, this imports no package above it."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ValueError, ImportError):  # no name of a module
        return False
    if spec is None or not rest:
        return spec is not None
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    if any(not folder.is_dir() for folder in folders):
        return True  # within an archive, of which only an import can tell
    *packages, last = rest
    for name in packages:
        folders = [folder / name for folder in folders if name and (folder / name).is_dir()]
    files = [last, *(last + suffix for suffix in all_suffixes())]
    return bool(last) and any((folder / file).exists() for folder in folders for file in files)


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
