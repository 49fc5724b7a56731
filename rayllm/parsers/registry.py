"""The parsers by their names. A plugin is a Python file that registers more of them:

from rayllm.parsers.parser import ToolParser
from rayllm.parsers.registry import register_tool_parser

@register_tool_parser("my_parser")
class MyParser(ToolParser):
    openers = ("<call>",)

    def calls(self, opener):
        name = []
        yield from self.reader.through(("</call>",), name.append)
        self.start("".join(name))
        self.arguments("{}")
        self.end()
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from rayllm.errors import ConfigError
from rayllm.parsers.parser import ReasoningParser, ToolParser

T = TypeVar("T", bound=type[ToolParser])
R = TypeVar("R", bound=type[ReasoningParser])

_TOOLS: dict[str, type[ToolParser]] = {}
_REASONING: dict[str, type[ReasoningParser]] = {}
_BUILT_IN = (
    "tools_json", "tools_cohere", "tools_apertus", "tools_pythonic", "tools_xml", "harmony", "reasoning",
)  # fmt: skip
_PLUGINS = "rayllm_parser_plugin_"


def register_tool_parser(*names: str) -> Callable[[T], T]:
    """A decorator that makes a class the tool parser of these names, in place of what had them."""

    def register(cls: T) -> T:
        _TOOLS.update(dict.fromkeys(names, cls))
        return cls

    return register


def register_reasoning_parser(*names: str) -> Callable[[R], R]:
    """A decorator that makes a class the reasoning parser of these names, in place of what had them."""

    def register(cls: R) -> R:
        _REASONING.update(dict.fromkeys(names, cls))
        return cls

    return register


def tool_parsers() -> Mapping[str, type[ToolParser]]:
    """All tool parsers by name."""
    _import_built_in()
    return _TOOLS


def reasoning_parsers() -> Mapping[str, type[ReasoningParser]]:
    """All reasoning parsers by name."""
    _import_built_in()
    return _REASONING


def load_plugin(option: str, path: str) -> None:
    """Run a Python file, once in this process, so that it can register parsers.

    Raises:
        ConfigError: it cannot be run; names the option.
    """
    _import_built_in()
    file = Path(path).resolve()
    name = _PLUGINS + file.as_posix()
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(option, f"{path} is no Python file", "name a file that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is the user's code
        del sys.modules[name]
        raise ConfigError(option, f"cannot load {path}: {error}") from error


def _import_built_in() -> None:
    for name in _BUILT_IN:
        importlib.import_module(f"rayllm.parsers.{name}")
