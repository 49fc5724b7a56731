"""What form a request wants its output to have, and how large such a wish may be."""

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rayllm.errors import RequestError

Backend = Literal["auto", "xgrammar", "guidance", "outlines"]
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
HOLD_JSON = ("json", "structural_tag")
"""Those that may be given as objects."""
LONGEST: Mapping[str, int] = {
    "json": 256 << 10,
    "json_object": 256,
    "regex": 32 << 10,
    "choice": 128 << 10,
    "grammar": 128 << 10,
    "structural_tag": 256 << 10,
    "whitespace_pattern": 256,
}
"""Characters, of all choices together."""
MOST_CHOICES = 4096
DEEPEST = 100
"""Levels of objects and arrays in a schema."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The form of an output: one of `FORMS`, and how its library is to read it."""

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    """In Lark's notation, or in GBNF (with `::=`)."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text in which certain tags, wherever they begin, hold what their schemas say."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between the parts of JSON."""
    disable_any_whitespace: bool | None = None
    """No white space between the parts of JSON. None: as --structured-outputs-config says; so below."""
    disable_additional_properties: bool | None = None
    """No properties of objects but those that the schema names."""
    backend: Backend | None = None
    field: str = "structured_outputs"
    """The field of the request that asks for it, for errors."""
    after_ids: tuple[tuple[int, ...], ...] = ()
    """Everything is free until the tokens of one of these, the ends of reasoning, stand in the output. Empty: nothing
    is."""
    begin_ids: tuple[tuple[int, ...], ...] = ()
    """That holds only for outputs that begin with one of these, the marks of reasoning; others keep to the form from
    their first token on. Empty: it holds for all."""

    @property
    def form(self) -> str:
        """Which of `FORMS` it is."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    def text(self) -> str:
        """The form as text: a schema, the choices or the tags as JSON, or as it was given."""
        if self.json_object:
            return '{"type": "object"}'
        value = getattr(self, self.form)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check_structured(given: StructuredOutputs) -> None:
    """Check that it asks for one form of a bearable size.

    Raises:
        RequestError: names the field.
    """
    if reason := _wrong(given):
        raise RequestError(f"{given.field}: {reason}", given.field)


def _wrong(given: StructuredOutputs) -> str | None:
    """Why it cannot be used, or None."""
    forms = [name for name in FORMS if getattr(given, name) not in (None, False)]
    if len(forms) != 1:
        return f"give one of {', '.join(FORMS)}, not {' and '.join(forms) or 'none'}"
    form = forms[0]
    if given.choice is not None and not (given.choice and all(given.choice)):
        return "choice must hold texts, and none that is empty"
    if given.choice is not None and len(given.choice) > MOST_CHOICES:
        return f"choice has {len(given.choice)} entries; the limit is {MOST_CHOICES}"
    if given.whitespace_pattern is not None and form not in ("json", "json_object"):
        return "whitespace_pattern is for JSON"
    if given.whitespace_pattern is not None and given.disable_any_whitespace:
        return "whitespace_pattern contradicts disable_any_whitespace"
    try:
        msgspec.msgpack.encode(given)
        text = given.text()
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        return f"{form} cannot be written as JSON: {error}"
    return (
        _wrong_text(form, text)
        or _wrong_text("whitespace_pattern", given.whitespace_pattern or " ")
        or (_wrong_json(form, text) if form in HOLD_JSON else None)
    )


def _wrong_text(name: str, text: str) -> str | None:
    if not text:
        return f"{name} must not be empty"
    if len(text) > LONGEST[name]:
        return f"{name} has {len(text)} characters; the limit is {LONGEST[name]}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{name} holds half of a surrogate pair"
    return None


def _wrong_json(form: str, text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"{form} is not JSON: {error}"
    if not isinstance(value, dict):
        return f"{form} must be a JSON object"
    if depth(value) > DEEPEST:
        return f"{form} is nested more than {DEEPEST} levels deep"
    return None


def depth(value: Any) -> int:
    """Levels of objects and arrays in a JSON value, found without recursion."""
    deepest, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        deepest += 1
        level = [part for item in level for part in (item.values() if isinstance(item, dict) else item)]
    return deepest
