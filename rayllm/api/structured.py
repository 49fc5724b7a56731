"""From the fields of a request to the form of its output."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from rayllm.api.wire import SamplingFields
from rayllm.errors import RequestError
from rayllm.messages.structured import FORMS, HOLD_JSON, StructuredOutputs, check_structured

OLDER = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Fields of older clients, and the forms that they ask for."""
KEYS = (*FORMS, "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "backend")
"""What `structured_outputs` may hold, beside `disable_fallback`: another library is never tried."""


def structured_of(request: SamplingFields) -> StructuredOutputs | None:
    """The form that a request asks for, None where it takes any.

    Raises:
        RequestError: names the field.
    """
    asked = [one for one in (_of_format(request), _of_structured(request), *_of_older(request)) if one is not None]
    if len(asked) > 1:
        raise RequestError(f"{asked[0].field} and {asked[1].field} exclude each other; send one", asked[1].field)
    if not asked:
        return None
    (one,) = asked
    try:
        # As text, for JSON may hold numbers that messages between processes cannot.
        given = {name: getattr(one, name) for name in HOLD_JSON}
        texts = {name: json.dumps(v, ensure_ascii=False) for name, v in given.items() if isinstance(v, dict)}
    except RecursionError:
        raise RequestError(f"{one.field} is nested too deeply", one.field) from None
    one = msgspec.structs.replace(one, **texts)
    check_structured(one)
    return one


def _of_format(request: SamplingFields) -> StructuredOutputs | None:
    given, field = request.response_format, "response_format"
    if given is None:
        return None
    match given.get("type"):
        case "text":
            _only(given, field, "type")
            return None
        case "json_object":
            _only(given, field, "type")
            return StructuredOutputs(json_object=True, field=field)
        case "json_schema":
            _only(given, field, "type", "json_schema")
            wanted = given.get("json_schema")
            if not isinstance(wanted, dict) or not isinstance(wanted.get("schema"), dict):
                raise RequestError("response_format.json_schema must be an object with a schema", field)
            _only(wanted, f"{field}.json_schema", "name", "description", "schema", "strict")
            return StructuredOutputs(json=wanted["schema"], field=field)
        case "structural_tag":
            _only(given, field, "type", "structures", "triggers", "format")
            return StructuredOutputs(structural_tag=given, field=field)
    raise RequestError(
        "response_format.type must be 'text', 'json_object', 'json_schema' or 'structural_tag', "
        f"not {given.get('type')!r:.40}", field,
    )  # fmt: skip


def _only(given: Mapping[str, Any], place: str, *keys: str) -> None:
    for key in given:
        if key not in keys:
            raise RequestError(f"{place}.{key} is unknown; {place} takes {', '.join(keys)}", place.partition(".")[0])


def _of_structured(request: SamplingFields) -> StructuredOutputs | None:
    given, field = request.structured_outputs, "structured_outputs"
    if given is None:
        return None
    _only(given, field, *KEYS, "disable_fallback")
    values = {key: value for key, value in given.items() if value is not None and key != "disable_fallback"}
    return _converted({**values, "field": field})


def _of_older(request: SamplingFields) -> list[StructuredOutputs]:
    found = [(name, form) for name, form in OLDER.items() if getattr(request, name) is not None]
    more = {
        key: value
        for key, value in (
            ("whitespace_pattern", request.guided_whitespace_pattern),
            ("backend", request.guided_decoding_backend),
        )
        if value is not None
    }
    if more and not found:
        name = "guided_decoding_backend" if "backend" in more else "guided_whitespace_pattern"
        raise RequestError(f"{name} needs one of {', '.join(OLDER)}", name)
    return [_converted({form: getattr(request, name), **more, "field": name}) for name, form in found]


def _converted(values: dict[str, Any]) -> StructuredOutputs:
    try:
        return msgspec.convert(values, StructuredOutputs)
    except msgspec.ValidationError as error:
        raise RequestError(f"{values['field']}: {error}", values["field"]) from None
