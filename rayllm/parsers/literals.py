"""Values as models write them, read piece by piece, and given out as JSON.

JSON, Python's literals and FunctionGemma's notation are one language with other quotes and words. What is given out is
at any moment the beginning of a sound JSON text: control characters in strings are escaped, a comma before a closing
bracket is left out, `True` becomes `true`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayllm.parsers.reader import Broken, Emit, Reader, Reading, Truncated

_ESCAPES = {**{i: f"\\u{i:04x}" for i in range(32)}, 9: "\\t", 10: "\\n", 13: "\\r", 34: '\\"'}
_RAW = str.maketrans({"\\": "\\\\"})
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_SCALAR = re.compile(r"[^\s,:;{}\[\]()<>\"'`]+")
_BARE = re.compile(r"[^\s,:{}\[\]()<>\"'`]+")
_HEX = re.compile(r"[0-9A-Fa-f]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"[+-]?(?!0[0-9])[0-9.][0-9A-Za-z_.+-]*")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_LONGEST_NUMBER = 4000


@dataclass(frozen=True, slots=True)
class Dialect:
    """How strings and keys are written."""

    quotes: tuple[str, ...] = ('"',)
    """Of strings with escapes."""
    raw_quote: str = ""
    """Of strings without."""
    bare_keys: bool = False
    tuples: bool = False
    """Whether round brackets hold lists."""
    hex_escapes: Mapping[str, int] = field(default_factory=lambda: {"u": 4})
    """Digits of escapes by their letters."""


JSON = Dialect()
PYTHON = Dialect(quotes=('"', "'"), tuples=True, hex_escapes={"u": 4, "x": 2, "U": 8})


def copy_value(reader: Reader, emit: Emit, dialect: Dialect = JSON) -> Reading[None]:
    """Read one value, and emit it as JSON. White space stays as it is.

    Raises:
        Broken: it is none; it may have been emitted in part.
    """
    closing: list[str] = []
    lead, wanted, may_close = "", "value", False
    while True:
        lead += yield from reader.space()
        char = yield from reader.peek()
        if not char:
            raise Truncated
        if wanted == "comma" and char == "," and closing:
            lead += reader.take()
            wanted, may_close = ("key" if closing[-1] == "}" else "value"), True
            continue
        if wanted == "colon" and char == ":":
            lead += reader.take()
            wanted = "value"
            continue
        if closing and char == closing[-1] and (may_close or wanted == "comma"):
            reader.take()
            closing.pop()
            emit(lead.replace(",", "") + char.replace(")", "]"))
        elif wanted == "key":
            yield from _key(reader, lead, emit, dialect)
            lead, wanted, may_close = "", "colon", False
            continue
        elif wanted != "value":
            raise Broken
        elif char in "{[" or (char == "(" and dialect.tuples):
            closing.append(_CLOSING[reader.take()])
            emit(lead + char.replace("(", "["))
            lead, wanted, may_close = "", ("key" if char == "{" else "value"), True
            continue
        elif not (yield from _string(reader, lead, emit, dialect)):
            emit(lead + _scalar((yield from reader.some(_SCALAR))))
        if not closing:
            return
        lead, wanted, may_close = "", "comma", False


def read_value(reader: Reader, dialect: Dialect = JSON) -> Reading[str]:
    """The JSON text of one value.

    Raises:
        Broken: it is none.
    """
    parts: list[str] = []
    yield from copy_value(reader, parts.append, dialect)
    return "".join(parts)


def read_string(reader: Reader) -> Reading[str]:
    """The text that a JSON string stands for.

    Raises:
        Broken: it is none.
    """
    parts: list[str] = []
    if not (yield from _string(reader, "", parts.append, JSON)):
        raise Broken
    return unquoted("".join(parts))


def unquoted(string: str) -> str:
    """The text that a sound JSON string stands for; half surrogate pairs are replaced."""
    text: str = json.loads(string)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def json_of(text: str) -> str | None:
    """The JSON text of a value in JSON or in Python's notation, None if it is none."""
    reader = Reader()
    reader.push(text.strip())
    reader.end()
    try:
        value = _run(read_value(reader, PYTHON))
    except Broken:
        return None
    return value if _run(reader.peek()) == "" else None


def _run(reading: Reading[Any]) -> Any:
    """The result of reading a text that is all there."""
    try:
        next(reading)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits for text after the end")


def _key(reader: Reader, lead: str, emit: Emit, dialect: Dialect) -> Reading[None]:
    if (yield from _string(reader, lead, emit, dialect)):
        return
    if not dialect.bare_keys:
        raise Broken
    emit(lead + quoted((yield from reader.some(_BARE))))


def _string(reader: Reader, lead: str, emit: Emit, dialect: Dialect) -> Reading[bool]:
    """Read a string, if one comes."""
    openings = (*dialect.quotes, dialect.raw_quote) if dialect.raw_quote else dialect.quotes
    quote = yield from reader.literal(*openings)
    if not quote:
        return False
    emit(lead + '"')
    if quote == dialect.raw_quote:
        found = yield from reader.through((quote,), lambda text: emit(text.translate(_RAW).translate(_ESCAPES)))
    else:
        while (
            found := (yield from reader.through((quote, "\\"), lambda text: emit(text.translate(_ESCAPES))))
        ) == "\\":
            emit((yield from _escape(reader, dialect)))
    if found is None:
        raise Truncated
    emit('"')
    return True


def _escape(reader: Reader, dialect: Dialect) -> Reading[str]:
    """What stands behind a backslash, as JSON. An unknown escape is a backslash, as Python has it."""
    char = yield from reader.peek()
    if not char:
        raise Truncated
    if char in '"\\/bfnrt':
        return "\\" + reader.take()
    if char == "'":
        return reader.take()
    if (length := dialect.hex_escapes.get(char)) is not None:
        return (yield from _hex_escape(reader, length))
    return "\\\\"


def _hex_escape(reader: Reader, length: int) -> Reading[str]:
    letter, digits = reader.take(), ""
    while len(digits) < length and _HEX.fullmatch((yield from reader.peek()) or "-"):
        digits += reader.take()
    if len(digits) < length:
        return "\\\\" + letter + digits
    if length < 8:
        return f"\\u{digits:>04}"
    code = int(digits, 16)
    return quoted(chr(code))[1:-1] if code < 0xD800 or 0xDFFF < code < 0x110000 else "\\ufffd"


def _scalar(text: str) -> str:
    if (word := _WORDS.get(text)) is not None:
        return word
    if _NUMBER.fullmatch(text):
        return text
    if _PYTHON_NUMBER.fullmatch(text) and len(text) < _LONGEST_NUMBER:
        for read in (lambda: int(text, 0), lambda: float(text)):
            try:
                return json.dumps(read(), allow_nan=False)
            except ValueError:
                continue
    raise Broken
