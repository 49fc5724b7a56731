"""A request's body to one of the types in `wire`."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import pydantic

from rayllm.api.wire import IGNORABLE, REFUSED, Refusal, Wire
from rayllm.errors import RequestError

R = TypeVar("R", bound=Wire)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, by RFC 8259: strict UTF-8, no NaN, no half surrogate pairs.

    Raises:
        RequestError: it is something else.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the body is JSON nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise RequestError(f"the body is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def parse_request(kind: type[R], body: bytes, refused: Mapping[str, Refusal] = REFUSED) -> R:
    """The request in a body.

    Raises:
        RequestError: see `parse_fields`, or the body is no JSON object.
    """
    return parse_fields(kind, parse_json(body), refused)


def parse_fields(kind: type[R], fields: dict[str, Any], refused: Mapping[str, Refusal] = REFUSED) -> R:
    """The request that has these fields, which are taken over. `refused` are those known but not honoured.

    Raises:
        RequestError: a field is unknown, has the wrong type, or asks for what this server cannot do.
    """
    known = kind.model_fields
    for name in [name for name in fields if name not in known]:
        value = fields.pop(name)
        if value is not None and name not in IGNORABLE:
            _refuse_unknown(name, value, known, refused)
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as e:
        first = e.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{place}: {first['msg']}", str(first["loc"][0]) if first["loc"] else None) from None


def _refuse_unknown(name: str, value: Any, known: Mapping[str, Any], refused: Mapping[str, Refusal]) -> None:
    refusal = refused.get(name)
    if refusal is None:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "remove it"
        raise RequestError(f"unknown field {name[:100]!r}; {hint}", name[:100])
    if not any(value == neutral and type(value) is type(neutral) for neutral in refusal.neutral):
        raise RequestError(f"{name} cannot be used: {refusal.why}", name)
