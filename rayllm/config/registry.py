"""All options together, found by any of their spellings."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from rayllm.config.legacy import Legacy, modernize
from rayllm.config.option import Option
from rayllm.config.sections import SECTIONS
from rayllm.config.sections.legacy import LEGACY
from rayllm.config.twins import unify
from rayllm.errors import ConfigError


class Registry:
    """The declared options, and those of older releases."""

    def __init__(self, sections: Mapping[str, Iterable[Option]], legacy: Iterable[Legacy] = ()) -> None:
        self._options: dict[str, Option] = {}
        self._aliases: dict[str, Option] = {}
        self.legacy: dict[str, Legacy] = {one.option.name: one for one in legacy}
        """By name."""
        for section, options in sections.items():
            for declared in options:
                option = replace(declared, section=section)
                assert option.name not in {*self._options, *self.legacy}, option.name
                self._options[option.name] = option
                for alias in option.aliases:
                    assert alias not in self._aliases, alias
                    self._aliases[alias] = option

    def __iter__(self) -> Iterator[Option]:
        """The options, without those of older releases."""
        return iter(self._options.values())

    def __getitem__(self, name: str) -> Option:
        """The option of this exact name.

        Raises:
            KeyError: there is none.
        """
        return self._options[name]

    def alias(self, spelling: str) -> Option | None:
        """The option that a short spelling such as `-tp` stands for."""
        return self._aliases.get(spelling)

    def find(self, name: str) -> Option:
        """The option of this name (without dashes in front; `_` stands for `-`).

        Raises:
            ConfigError: it is unknown.
        """
        name = name.replace("_", "-")
        if name in self._options:
            return self._options[name]
        if name in self.legacy:
            return self.legacy[name].option
        near = difflib.get_close_matches(name, [*self._options, *self.legacy], n=1)
        raise ConfigError(f"--{name}", "is not an option", f"did you mean --{near[0]}?" if near else "see --help=all")

    def values(self, given: Mapping[str, Any]) -> "Values":
        """The given values, completed with defaults. Names must be exact.

        Raises:
            ConfigError: two spellings of one setting contradict each other.
        """
        modern, notes = modernize(given, self.legacy)
        assert all(name in self._options for name in modern), modern
        modern = {
            name: value if value is None else self._options[name].from_value(value)
            for name, value in unify(modern).items()
        }
        complete = {option.name: option.default for option in self} | {
            name: filled(self._options[name].default, value) if self._options[name].keyed else value
            for name, value in modern.items()
        }
        return Values(complete, frozenset(modern), notes)


class Values(Mapping[str, Any]):
    """A value for every option, and which of them were given. Read-only."""

    def __init__(self, values: Mapping[str, Any], given: frozenset[str], notes: tuple[str, ...] = ()) -> None:
        self._values = dict(values)
        self.given = given
        self.notes = notes
        """What the user should know about the options that were given."""

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def filled(default: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """The value, with the defaults of the keys that it lacks."""
    return {
        key: filled(part, value[key])
        if isinstance(part, dict) and isinstance(value.get(key), dict)
        else value.get(key, part)
        for key, part in default.items()
    } | {key: part for key, part in value.items() if key not in default}


@cache
def registry() -> Registry:
    """The options of rayllm."""
    return Registry(SECTIONS, LEGACY)
