"""What an option is: its name, type, default, limits, state and help, declared once.

The command line, YAML files, application configs, `--help` and the table of options are all derived from these
declarations, so that a value means the same wherever it is written. Values are checked here, one at a time; what
depends on several options, on the model or on the machine is checked by `rayllm.config.resolve`.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

from rayllm.errors import ConfigError

Check = Callable[[Any], str | None]
"""Says why a value cannot be honoured, or None."""

MOST = 2**63 - 1
"""What a number may be at most: settings cross to other processes and to compiled code."""
DEEPEST = 64
"""Levels of objects and lists in a JSON value."""
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class State(Enum):
    """Whether an option is honoured."""

    EFFECTIVE = "effective"
    CUDA = "cuda"
    """On a CUDA GPU only; without one it is refused, or warned of."""
    PLANNED = "planned"
    """Not yet: refused."""


class Kind(Enum):
    """How an option's value is written and what it becomes."""

    BOOL = "bool"
    INT = "int"
    HUMAN_INT = "human_int"
    FLOAT = "float"
    STR = "str"
    ENUM = "enum"
    LIST = "list"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. `name` is the flag without its leading dashes."""

    name: str
    kind: Kind
    help: str
    state: State = State.EFFECTIVE
    default: Any = None
    unit: str = ""
    """Of numbers."""
    choices: tuple[str | int, ...] = ()
    """ENUM, INT: the closed set. STR: known values, for `--help`; `check` decides."""
    aliases: tuple[str, ...] = ()
    """Other spellings with their dashes, such as `-tp`."""
    negatable: bool = True
    """BOOL: whether `--no-NAME` exists."""
    separator: str | None = None
    """LIST: what parts the elements of one argument, where one argument may hold several."""
    integers: bool = False
    """LIST: whether the elements are integers."""
    objects: bool = False
    """LIST: whether elements may be JSON objects."""
    repeats: bool = False
    """LIST: whether a second use adds to the first."""
    keyed: bool = False
    """JSON: whether the default has all the keys there are; those not given keep their defaults."""
    plain: bool = False
    """JSON: whether text that is no JSON stands for itself."""
    bare: bool = False
    """STR: whether it may stand without a value, which then is True."""
    minimum: float | None = None
    maximum: float | None = None
    check: Check | None = None
    auto: bool = False
    """HUMAN_INT: whether `auto` and -1 are taken; both become -1."""
    honoured: tuple[Any, ...] = ()
    """Not EFFECTIVE: values that ask for what is done anyway, beside the default."""
    warns: bool = False
    """CUDA: whether it is warned of, not refused, where there is no GPU."""
    why: str = ""
    """Not EFFECTIVE: the reason, if there is more to say than the state does."""
    cure: str = ""
    """Not EFFECTIVE: what to do instead."""
    section: str = ""
    """Set by the registry from the section it is declared in."""

    @property
    def flag(self) -> str:
        """The name with its dashes."""
        return f"--{self.name}"

    def from_text(self, text: str) -> Any:
        """The value that a command-line argument stands for (a list of elements for a LIST).

        Raises:
            ConfigError: it is none of this option's values.
        """
        return self.checked(_READERS[self.kind](self, text))

    def from_value(self, value: Any) -> Any:
        """The value that a YAML or Python value stands for. Text is read as on the command line.

        Raises:
            ConfigError: it is none of this option's values.
        """
        if self.kind is Kind.LIST and not isinstance(value, str):
            return self.checked(_items(self, value if isinstance(value, list | tuple) else [value]))
        if self.kind is Kind.JSON and not isinstance(value, str):
            return self.checked(value)
        if isinstance(value, bool) and (self.kind is Kind.BOOL or self.bare):
            return self.checked(value)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(self.flag, f"{value!r} is not a value of type {self.kind.value}")
        return self.from_text(str(value))

    def checked(self, value: Any) -> Any:
        """The value, if it lies within the limits.

        Raises:
            ConfigError: it does not.
        """
        if isinstance(value, int | float) and not isinstance(value, bool) and not (self.auto and value == -1):
            if self.minimum is not None and value < self.minimum:
                raise ConfigError(self.flag, f"{value} is below {self.minimum}, the smallest value")
            most = MOST if self.maximum is None else self.maximum
            if value > most:
                raise ConfigError(self.flag, f"{value} is above {most}, the largest value")
            if self.kind is Kind.INT and self.choices and value not in self.choices:
                raise ConfigError(self.flag, f"{value} is not one of {', '.join(map(str, self.choices))}")
        if self.kind in (Kind.STR, Kind.LIST):
            for text in value if isinstance(value, list) else [value]:
                _check_text(self, text)
        if self.kind is Kind.JSON:
            _check_json(self.flag, value)
        if self.keyed:
            _check_keys(self.flag, value, self.default)
        if self.check is not None and (reason := self.check(value)):
            raise ConfigError(self.flag, reason)
        return value


def spellings(option: Option) -> list[str]:
    """All of them, the name first."""
    negative = [f"--no-{option.name}"] if option.kind is Kind.BOOL and option.negatable else []
    return [option.flag, *negative, *option.aliases]


def _check_text(option: Option, text: Any) -> None:
    """Raise a ConfigError for text that says nothing, unless it is the default, or that no path or header can hold."""
    if not isinstance(text, str):
        return
    if not text.strip() and text != option.default:
        raise ConfigError(option.flag, f"{text!r} is empty", "give a value, or leave it out")
    if "\0" in text:
        raise ConfigError(option.flag, f"{text!r} holds a NUL character", "leave that out")


def _check_json(path: str, value: Any, depth: int = 0) -> None:
    """Raise a ConfigError for what JSON cannot hold (YAML can), or what is nested too deeply."""
    if depth > DEEPEST:
        raise ConfigError(path[:200], f"is nested more than {DEEPEST} levels deep", "nest it less")
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise ConfigError(path, f"its key {key!r} is not text", "put it in quotes")
            _check_json(f"{path}.{key}", part, depth + 1)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_json(path, part, depth + 1)
    elif not isinstance(value, str | int | float | None) or value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(path, f"{value!r} is not a JSON value", "write text, a finite number, true, false or null")


def _check_keys(path: str, value: Any, default: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a key that the default lacks, or a value of another type than its own."""
    if not isinstance(value, dict):
        raise ConfigError(path, f"{value!r} is not a JSON object")
    for key, part in value.items():
        if key not in default:
            near = difflib.get_close_matches(key, default, n=1)
            cure = f"did you mean {near[0]}?" if near else f"its keys are {', '.join(default)}"
            raise ConfigError(f"{path}.{key}", "is not a key of this option", cure)
        wanted = default[key]
        if isinstance(wanted, dict) and wanted:
            _check_keys(f"{path}.{key}", part, wanted)
        elif wanted is not None and not _alike(part, wanted):
            raise ConfigError(f"{path}.{key}", f"{part!r} is not of the type of its default, {json.dumps(wanted)}")


def _alike(value: Any, default: Any) -> bool:
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, type(default))


def human_int(text: str) -> int:
    """The integer that `8k`, `2M` or `25.6k` stands for: lower case is decimal, upper case binary.

    Raises:
        ValueError: it is none; says why.
    """
    match = re.fullmatch(r"([+-]?\d+)(\.\d+)?([kmgKMG])?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number such as 4096, 8k (8000), 8K (8192) or 25.6k")
    whole, part, unit = match.groups()
    if part and unit not in ("k", "m", "g"):
        raise ValueError(f"{text!r} has a fraction, which only the decimal suffixes k, m and g allow")
    number = Fraction(whole + (part or "")) * UNITS.get(unit or "", 1)
    if number.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def _read_bool(option: Option, text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise ConfigError(option.flag, f"{text!r} is neither true nor false")


def _read_int(option: Option, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(option.flag, f"{text!r} is not an integer") from None


def _read_human_int(option: Option, text: str) -> int:
    if option.auto and text in ("auto", "-1"):
        return -1
    try:
        return human_int(text)
    except ValueError as error:
        raise ConfigError(option.flag, str(error)) from None


def _read_float(option: Option, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(option.flag, f"{text!r} is not a number") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ConfigError(option.flag, f"{text!r} is not a finite number")
    return number


def _read_str(option: Option, text: str) -> str:
    return text


def _read_enum(option: Option, text: str) -> str | None:
    if text not in option.choices:
        raise ConfigError(option.flag, f"{text!r} is not one of {', '.join(map(str, option.choices))}")
    return None if text == "None" else text


def _read_list(option: Option, text: str) -> list[Any]:
    if text.lstrip().startswith("["):
        items = read_json(option, text)
        if not isinstance(items, list):
            raise ConfigError(option.flag, f"{text!r} is not a JSON list")
        return _items(option, items)
    if option.separator is not None:
        return [part.strip() for part in text.split(option.separator) if part.strip()]
    return _items(option, [text])


def _items(option: Option, items: Iterable[Any]) -> list[Any]:
    """Elements of a list as they are kept: objects, integers or text."""
    return [_item(option, item) for item in items]


def _item(option: Option, item: Any) -> Any:
    if option.objects and isinstance(item, dict):
        return item
    if isinstance(item, bool) or not isinstance(item, str | int):
        raise ConfigError(option.flag, f"{item!r} is not {'an integer' if option.integers else 'text'}")
    return _read_int(option, str(item)) if option.integers else str(item)


def read_json(option: Option, text: str) -> Any:
    """The JSON value in `text`.

    Raises:
        ConfigError: it is no JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ConfigError(option.flag, f"is nested more than {DEEPEST} levels deep", "nest it less") from None
    except ValueError as error:
        if option.plain:
            return text
        raise ConfigError(option.flag, f"{text!r} is not JSON ({error})", "quote it for the shell with '...'") from None


_READERS: dict[Kind, Callable[[Option, str], Any]] = {
    Kind.BOOL: _read_bool,
    Kind.INT: _read_int,
    Kind.HUMAN_INT: _read_human_int,
    Kind.FLOAT: _read_float,
    Kind.STR: _read_str,
    Kind.ENUM: _read_enum,
    Kind.LIST: _read_list,
    Kind.JSON: read_json,
}
