"""JSON schemas and structural tags as clients write them."""

from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

from rayllm.structured.grammar import GrammarError

_HOLD_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keys whose value maps names to schemas."""
_HOLD_VALUES = ("enum", "const", "default", "examples")
_DROPPED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired",
     "dependentSchemas", "$dynamicRef"}
)  # fmt: skip
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keys beside which xgrammar looks at no other."""
_OF_OBJECTS = frozenset({"properties", "required", "patternProperties", "propertyNames", "additionalProperties",
                         "unevaluatedProperties", "minProperties", "maxProperties"})  # fmt: skip
_OF_ARRAYS = frozenset({"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"})
_OF_OTHERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
                        "maxLength", "pattern"})  # fmt: skip
_LOWER, _UPPER = frozenset({"minimum", "exclusiveMinimum"}), frozenset({"maximum", "exclusiveMaximum"})
_ASKING = _OF_OBJECTS | _OF_ARRAYS | _OF_OTHERS | {"type", *_ALONE}
"""Keys that say what a value must be."""
_SHOW_TYPE = frozenset({"properties", "additionalProperties", "items", "prefixItems", "unevaluatedItems"})
"""Keys by which xgrammar takes a schema without a type for one of objects or arrays."""
_IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Keys whose schemas hold for the same value as the one that has the key."""


@dataclass(frozen=True, slots=True)
class Tag:
    """Behind `trigger` the text is `begin`, then JSON by `schema`, then `end`. `begin` starts with the trigger."""

    trigger: str
    begin: str
    schema: Any
    end: str


def closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it names. Its depth must be bounded."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: {name: closed(part) for name, part in value.items()}
        if key in _HOLD_SCHEMAS and isinstance(value, dict)
        else value
        if key in _HOLD_VALUES
        else closed(value)
        for key, value in schema.items()
    }
    if "properties" in out and "additionalProperties" not in out:
        out["additionalProperties"] = False
    return out


def check_kept(schema: Any, library: str) -> None:
    """Refuse what a library that looks at some keywords only would pass over. The schema's depth must be bounded.

    Raises:
        GrammarError: names a keyword.
    """
    for part in _every(schema):
        for key, value in part.items():
            if key in _DROPPED and value is not False:
                raise GrammarError(f"{library} does not keep to {key!r} of JSON schemas; leave it out")


def check_seen(schema: Any) -> None:
    """Refuse the keywords that xgrammar knows, and would pass over where they stand. The depth must be bounded.

    Raises:
        GrammarError: names a keyword.
    """
    for part in _every(schema):
        asked = part.keys() & _ASKING
        alone = next((key for key in _ALONE if key in asked), None)
        if alone is not None and (others := asked - {alone} - _implied(part, alone)):
            reason = f"does not look at {min(others)!r} beside {alone!r}"
        elif alone is None and "type" not in asked and asked and not asked & _SHOW_TYPE:
            reason = f"looks at {min(asked)!r} only beside 'type'; add that"
        elif passed := _passed_over(part):
            reason = f"does not keep to {passed}; leave it out"
        else:
            continue
        raise GrammarError(f"xgrammar {reason}, or use the backend guidance")


def _passed_over(part: dict[str, Any]) -> str | None:
    """What xgrammar passes over with a warning, among keywords of one type."""
    if len(part.get("allOf", ())) > 1:
        return "'allOf' of several schemas"
    types, required = part.get("type"), part.get("required", ())
    if set(map(str, required)) - set(part.get("properties", {})):
        return "'required' of names that 'properties' lacks"
    if "multipleOf" in part:
        if "number" in ([types] if isinstance(types, str) else types or ()):
            return "'multipleOf' of numbers that are not integers"
        if bool(part.keys() & _LOWER) != bool(part.keys() & _UPPER):
            return "'multipleOf' beside one limit"
    if part.keys() & {"minLength", "maxLength"} and part.keys() & {"pattern", "format"}:
        return "lengths beside 'pattern' or 'format'"
    return None


def _implied(part: dict[str, Any], alone: str) -> frozenset[str]:
    """What changes nothing beside a key: the type of the values that it lists."""
    values = [part["const"]] if alone == "const" else part["enum"] if alone == "enum" else None
    types = part.get("type")
    if not isinstance(values, list) or not isinstance(types, str | list):
        return frozenset()
    known = [types] if isinstance(types, str) else types
    return frozenset({"type"}) if all(_type_of(value) in known for value in values) else frozenset()


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "null"


def _every(schema: Any) -> Iterator[dict[str, Any]]:
    """All schemas within a schema, itself among them."""
    if isinstance(schema, list):
        for part in schema:
            yield from _every(part)
    elif isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in _HOLD_SCHEMAS and isinstance(value, dict):
                yield from _every(list(value.values()))
            elif key not in _HOLD_VALUES:
                yield from _every(value)


def refuse_loops(schema: Any) -> None:
    """Check that no reference leads to itself without going into a value. Libraries notice that only in the output.

    Its depth must be bounded.

    Raises:
        GrammarError: one does.
    """
    graph: dict[str, set[str]] = {}
    to_see = set(_references(schema))
    while to_see:
        place = to_see.pop()
        graph[place] = set(_in_place(_at(schema, place)))
        to_see |= graph[place] - graph.keys()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise GrammarError(f"the reference {error.args[1][0]!r:.100} leads to itself") from None


def _references(schema: Any) -> Iterator[str]:
    """All references into the schema itself."""
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)
    elif isinstance(schema, dict):
        yield from _reference(schema)
        for key, part in schema.items():
            if key not in _HOLD_VALUES:
                yield from _references(part)


def _in_place(schema: Any) -> Iterator[str]:
    """References that hold for the very value that the schema is for."""
    if isinstance(schema, dict):
        yield from _reference(schema)
        for key in _IN_PLACE:
            parts = schema.get(key)
            for part in parts if isinstance(parts, list) else ():
                yield from _in_place(part)


def _reference(schema: dict[str, Any]) -> Iterator[str]:
    place = schema.get("$ref")
    if isinstance(place, str) and (place == "#" or place.startswith("#/")):
        yield place


def _at(schema: Any, place: str) -> Any:
    """What a reference leads to; None if nothing, which the libraries report."""
    for name in place.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(name)] if name.isascii() and name.isdigit() and int(name) < len(schema) else None
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def tags_of(value: Any) -> list[Tag]:
    """The tags of `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`.

    Raises:
        GrammarError: it is not of that form.
    """
    if not isinstance(value, dict):
        raise GrammarError("it must be a JSON object")
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not structures or not all(isinstance(one, dict) for one in structures):
        raise GrammarError("structures must be a list of objects with begin, schema and end")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(one, str) and one for one in triggers):
        raise GrammarError("triggers must be a list of texts")
    return [_tag(i, structure, triggers) for i, structure in enumerate(structures)]


def _tag(index: int, structure: dict[str, Any], triggers: list[str]) -> Tag:
    begin, end = structure.get("begin"), structure.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError(f"structures[{index}] needs texts as begin and end")
    trigger = next((one for one in triggers if begin.startswith(one)), None)
    if trigger is None:
        raise GrammarError(f"structures[{index}] begins with none of the triggers")
    schema = structure.get("schema", {"type": "object"})
    if not isinstance(schema, dict):
        raise GrammarError(f"structures[{index}] needs an object as schema")
    refuse_loops(schema)
    return Tag(trigger, begin, schema, end)
