"""Tool calls that a request forces: the form that makes an answer a call, and what reads it."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rayllm.errors import RequestError
from rayllm.messages.structured import DEEPEST, StructuredOutputs, check_structured, depth
from rayllm.parsers.forced import NamedCall, RequiredCalls
from rayllm.parsers.parser import ToolParser

Json = dict[str, Any]
_FIELD = "tool_choice"


@dataclass(frozen=True, slots=True)
class Forced:
    """How an answer becomes one call or more."""

    form: StructuredOutputs
    parser: Callable[[Sequence[Json]], ToolParser]


def forced_calls(tools: Sequence[Json], choice: str | Json, parallel: bool) -> Forced:
    """What the `tool_choice` `required`, or one that names a function, asks of an answer.

    `tools` are known to be functions with names; `parallel` allows more than one call.

    Raises:
        RequestError: there is no such choice, or its schemas are too large.
    """
    for i, tool in enumerate(tools):
        if depth(_parameters(tool)) > DEEPEST - 5:
            raise RequestError(f"tools[{i}].function.parameters is nested too deeply", f"tools[{i}]")
    if choice == "required":
        return Forced(_form(_list_of(tools, parallel)), RequiredCalls)
    name = choice.get("function", {}) if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = name.get("name") if isinstance(name, dict) else None
    if not isinstance(name, str):
        raise RequestError("tool_choice must be 'none', 'auto', 'required' or name a function", _FIELD)
    named = next((tool for tool in tools if tool["function"]["name"] == name), None)
    if named is None:
        raise RequestError(f"tool_choice names {name[:100]!r}, which is none of the tools", _FIELD)
    return Forced(_form(_parameters(named)), functools.partial(NamedCall, name=name))


def _form(schema: Json) -> StructuredOutputs:
    form = StructuredOutputs(json=json.dumps(schema, ensure_ascii=False), field=_FIELD)
    check_structured(form)
    return form


def _list_of(tools: Sequence[Json], parallel: bool) -> Json:
    """The schema of a list of calls. Each tool's own stands in a place of its own, so that its references hold."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, "parameters": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    return {
        "type": "array",
        "minItems": 1,
        **({} if parallel else {"maxItems": 1}),
        "items": {"anyOf": calls},
        "$defs": {str(i): _moved(_parameters(tool), f"#/$defs/{i}") for i, tool in enumerate(tools)},
    }


def _parameters(tool: Json) -> Json:
    schema: Json = tool["function"].get("parameters") or {"properties": {}, "additionalProperties": False}
    return {"type": "object", **schema}


def _moved(schema: Any, place: str) -> Any:
    """A schema that stood by itself, as it is when it stands at a place of another."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + part[1:]
        if key == "$ref" and isinstance(part, str) and part.startswith("#")
        else _moved(part, place)
        for key, part in schema.items()
    }
