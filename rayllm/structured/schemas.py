"""JSON schemas and structural tags as clients write them."""

from dataclasses import dataclass
from typing import Any

from rayllm.structured.grammar import GrammarError

_HOLD_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keys whose value maps names to schemas."""
_HOLD_VALUES = ("enum", "const", "default", "examples")
_DROPPED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired",
     "dependentSchemas", "$dynamicRef"}
)  # fmt: skip


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
    if isinstance(schema, list):
        for part in schema:
            check_kept(part, library)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _DROPPED and value is not False:
            raise GrammarError(f"{library} does not keep to {key!r} of JSON schemas; leave it out")
        if key in _HOLD_SCHEMAS and isinstance(value, dict):
            check_kept(list(value.values()), library)
        elif key not in _HOLD_VALUES:
            check_kept(value, library)


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
    return Tag(trigger, begin, schema, end)
