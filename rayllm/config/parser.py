"""From a command line, a YAML file or a mapping to option values, by the rules of the declarations.

Every source gives plain values by option name; `parse_arguments` also merges a `--config` file beneath them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayllm.config.option import DEEPEST, Kind, Option, read_json
from rayllm.config.registry import Registry, Values
from rayllm.errors import ConfigError


def parse_arguments(arguments: Sequence[str], registry: Registry) -> Values:
    """The values of a command line: arguments first, then the `--config` file, then defaults.

    Raises:
        ConfigError: an option is unknown or its value cannot be used.
    """
    given = _Arguments(registry).parse(arguments)
    path = given.pop("config", None)
    if path is not None:
        beneath = parse_file(path, registry)
        given = {**beneath, **{name: _merge(beneath.get(name), value) for name, value in given.items()}}
    return registry.values(given)


def parse_file(path: str, registry: Registry) -> dict[str, Any]:
    """The values that a YAML file sets.

    Raises:
        ConfigError: it cannot be read, or an entry cannot be used.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content, as_written = yaml.load(text, _Yaml), yaml.load(text, yaml.BaseLoader)
    except OSError as error:
        raise ConfigError("--config", f"{path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError("--config", f"{path} is nested too deeply", "nest it less") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("--config", f"{path} holds no mapping of option names to values")
    return parse_mapping({name: _plain(value, as_written.get(name)) for name, value in content.items()}, registry)


class _Yaml(yaml.SafeLoader):
    """YAML whose numbers are those of JSON, 1e-5 among them, and which knows no dates."""


_Yaml.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def _plain(value: Any, as_written: Any) -> Any:
    """A number as it stands in the file: text, where an option wants that, must not lose the zeros of 0123 or 1.10."""
    if isinstance(value, list) and isinstance(as_written, list):
        return [_plain(part, text) for part, text in zip(value, as_written, strict=True)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return as_written if is_number and isinstance(as_written, str) else value


def parse_mapping(content: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    """The values that a mapping of option names (no dashes in front) sets.

    Raises:
        ConfigError: an entry cannot be used.
    """
    given: dict[str, Any] = {}
    for name, value in content.items():
        option = registry.find(str(name))
        if option.name == "config":
            raise ConfigError("--config", "a file cannot name another one")
        if value is None:
            continue
        given[option.name] = option.from_value(value)
    return given


class _Arguments:
    """One pass over a command line."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._given: dict[str, Any] = {}
        self._rest: list[str] = []

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        self._rest = list(arguments)
        while self._rest:
            token = self._rest.pop(0)
            if _is_option(token):
                self._take_option(token)
            elif "model" in self._given:
                raise ConfigError(token, f"is one argument too many; the model is {self._given['model']}")
            else:
                self._given["model"] = self._registry["model"].from_text(token)
        return self._given

    def _take_option(self, token: str) -> None:
        if re.fullmatch(r"-O\d+", token):
            token = f"-O={token[2:]}"
        spelling, equals, text = token.partition("=")
        spelling, dot, path = spelling.partition(".")
        option, negated = self._lookup(spelling, token)
        inline = text if equals else None
        if dot:
            self._take_key(option, path, inline)
        elif option.kind is Kind.BOOL:
            if inline is not None:
                raise self._takes_no_value(option)
            if self._rest and self._rest[0].lower() in ("true", "false"):
                raise self._takes_no_value(option)
            self._given[option.name] = option.checked(not negated)
        elif option.kind is Kind.LIST:
            items = self._list_items(option, inline)
            before = self._given.get(option.name, []) if option.repeats else []
            self._given[option.name] = option.checked([*before, *items])
        elif option.bare and inline is None and (not self._rest or _is_option(self._rest[0])):
            self._given[option.name] = True
        elif option.kind is Kind.JSON:
            self._merge_json(option, read_json(option, self._value(option, inline)))
        else:
            self._given[option.name] = option.from_text(self._value(option, inline))

    @staticmethod
    def _takes_no_value(option: Option) -> ConfigError:
        negative = f"{option.flag} or --no-{option.name}" if option.negatable else f"{option.flag}, or leave it out"
        return ConfigError(option.flag, "takes no value", f"write {negative}")

    def _lookup(self, spelling: str, token: str) -> tuple[Option, bool]:
        """The option of a spelling, and whether it is the negative form."""
        if not spelling.startswith("--"):
            option = self._registry.alias(spelling)
            if option is None:
                raise ConfigError(token, "is not an option", "see --help=all")
            return option, False
        name = spelling[2:].replace("_", "-")
        if name.startswith("no-"):
            positive = self._registry.find(name[3:])
            if positive.kind is not Kind.BOOL or not positive.negatable:
                raise ConfigError(spelling, f"{positive.flag} has no negative form")
            return positive, True
        return self._registry.find(name), False

    def _value(self, option: Option, inline: str | None) -> str:
        if inline is not None:
            return inline
        if not self._rest or _is_option(self._rest[0]):
            raise ConfigError(option.flag, "needs a value")
        return self._rest.pop(0)

    def _list_items(self, option: Option, inline: str | None) -> list[Any]:
        texts = [self._value(option, inline)]
        while inline is None and self._rest and not _is_option(self._rest[0]):
            texts.append(self._rest.pop(0))
        return [item for text in texts for item in option.from_text(text)]

    def _take_key(self, option: Option, path: str, inline: str | None) -> None:
        """`--option.key.key VALUE`, and `--option.key+ A,B`, which adds list elements."""
        if option.kind is not Kind.JSON:
            raise ConfigError(f"{option.flag}.{path}", f"{option.flag} has no keys")
        text = self._value(option, inline)
        appends = path.endswith("+")
        keys = path.removesuffix("+").split(".")
        if not all(keys):
            raise ConfigError(f"{option.flag}.{path}", "a key is empty")
        if len(keys) > DEEPEST:
            raise ConfigError(f"{option.flag}.{path[:200]}", f"is nested more than {DEEPEST} levels deep")
        value: Any = [_loose_json(part) for part in text.split(",")] if appends else _loose_json(text)
        if appends:
            value = _Appended(value)
        for key in reversed(keys):
            value = {key: value}
        self._merge_json(option, value)

    def _merge_json(self, option: Option, value: Any) -> None:
        merged = _merge(self._given.get(option.name), value)
        self._given[option.name] = option.checked(merged)


class _Appended(list[Any]):
    """List elements to be added to what is there."""


def _merge(old: Any, new: Any) -> Any:
    """`new` over `old`: mappings key by key, appended elements after the old ones, all else replaced."""
    if isinstance(new, dict):
        base = old if isinstance(old, dict) else {}
        return base | {key: _merge(base.get(key), value) for key, value in new.items()}
    if isinstance(new, _Appended):
        return [*(old if isinstance(old, list) else []), *new]
    return new


def _loose_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_option(token: str) -> bool:
    """Whether a token is an option rather than a value: `-1` and `-` are values."""
    return re.match(r"--[^\s]|-[A-Za-z]", token) is not None
