"""All options together, found by any of their spellings."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from rayllm.config.option import Option
from rayllm.config.sections import SECTIONS
from rayllm.config.sections.planned import PLANNED
from rayllm.errors import ConfigError


class Registry:
    """The declared options, and the names of those that are known but not supported yet."""

    def __init__(self, sections: Mapping[str, Iterable[Option]], planned: Iterable[str] = ()) -> None:
        self._options: dict[str, Option] = {}
        self._aliases: dict[str, Option] = {}
        self._planned = frozenset(planned)
        for section, options in sections.items():
            for declared in options:
                option = replace(declared, section=section)
                assert option.name not in {*self._options, *self._planned}, option.name
                self._options[option.name] = option
                for alias in option.aliases:
                    assert alias not in self._aliases, alias
                    self._aliases[alias] = option

    def __iter__(self) -> Iterator[Option]:
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
            ConfigError: it is unknown, or not supported yet.
        """
        name = name.replace("_", "-")
        option = self._options.get(name)
        if option is not None:
            return option
        if name in self._planned or name.removeprefix("no-") in self._planned:
            raise ConfigError(f"--{name}", "is not supported yet", "leave it out")
        near = difflib.get_close_matches(name, [*self._options, *self._planned], n=1)
        raise ConfigError(f"--{name}", "is not an option", f"did you mean --{near[0]}?" if near else "see --help")

    def values(self, given: Mapping[str, Any]) -> "Values":
        """The given values, completed with defaults. Names must be exact."""
        assert all(name in self._options for name in given), given
        return Values({option.name: option.default for option in self} | dict(given), frozenset(given))


class Values(Mapping[str, Any]):
    """A value for every option, and which of them were given. Read-only."""

    def __init__(self, values: Mapping[str, Any], given: frozenset[str]) -> None:
        self._values = dict(values)
        self.given = given

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@cache
def registry() -> Registry:
    """The options of rayllm."""
    return Registry(SECTIONS, PLANNED)
