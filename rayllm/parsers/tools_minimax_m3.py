"""MiniMax M3: calls written as elements that nest, each behind a mark that texts do not hold."""

import re
from collections.abc import Mapping
from typing import Any

from rayllm.parsers.literals import quoted
from rayllm.parsers.parser import ToolParser
from rayllm.parsers.reader import Broken, Reading, Truncated
from rayllm.parsers.registry import register_tool_parser
from rayllm.parsers.tools_xml import kinds_of, value_of

_MARK = "]<]minimax[>["
_ITEM = "item"
_DEEPEST = 32
_NAME = re.compile(r"[^<>\"'\s=/]+")

Schema = Mapping[str, Any]


@register_tool_parser("minimax_m3")
class MiniMaxM3(ToolParser):
    """`<tool_call><invoke name="f"><a>1</a><list><item>2</item></list></invoke></tool_call>`, a mark before each `<`.

    An element that holds others is an object, or a list where its schema says so or they are called `item`.
    """

    openers = (f"{_MARK}<tool_call>",)
    markers = (_MARK, "<tool_call>", "</tool_call>")

    def calls(self, opener: str) -> Reading[None]:
        """The calls of a section."""
        reader = self.reader
        while True:
            yield from reader.space()
            if (yield from reader.expect(f'{_MARK}<invoke name="', f"{_MARK}</tool_call>")).endswith("</tool_call>"):
                reader.mark()
                return
            name = yield from reader.some(_NAME)
            yield from reader.expect('">')
            yield from reader.space()
            yield from reader.expect(_MARK)
            if (yield from reader.peek()) != "<":
                raise Broken
            self.start(name)
            yield from self._members(self.tools.get(name, {}), "invoke", 0)
            self.end()

    def _members(self, schema: Schema, parent: str, depth: int, key: str = "", as_list: bool = False) -> Reading[None]:
        """The elements within one, behind the mark of the first, up to the end of `parent`.

        `key` is the name of the first if that is read already; in a list it is that of all.
        """
        reader, lead, item = self.reader, "[" if as_list else "{", key if as_list else ""
        if depth > _DEEPEST:
            raise Broken
        while True:
            if not key:
                if (yield from self._closes()):
                    yield from reader.expect(f"{parent}>")
                    self.arguments({"[": "[]", "{": "{}"}.get(lead, "]" if as_list else "}"))
                    return
                key = yield from self._key()
                if item not in ("", key):
                    raise Broken
            inner = _items(schema) if as_list else _property(schema, key)
            self.arguments(lead if as_list else f"{lead}{quoted(key)}: ")
            lead = ", "
            yield from self._element(key, inner, depth)
            key = ""
            yield from reader.space()
            yield from reader.expect(_MARK)

    def _closes(self) -> Reading[bool]:
        """Whether an element ends here, behind a mark, or another one begins."""
        yield from self.reader.expect("<")
        return bool((yield from self.reader.literal("/")))

    def _key(self) -> Reading[str]:
        key = yield from self.reader.some(_NAME)
        yield from self.reader.expect(">")
        return key

    def _element(self, key: str, schema: Schema, depth: int) -> Reading[None]:
        """What an element holds, and its end. Strings are given out as they come."""
        reader, kinds, end = self.reader, kinds_of(schema), f"{_MARK}</{key}>"
        if kinds == {"string"}:
            self.arguments('"')
            if (yield from reader.through((end,), lambda text: self.arguments(quoted(text)[1:-1]))) is None:
                raise Truncated
            self.arguments('"')
            return
        parts: list[str] = []
        if (yield from reader.through((_MARK,), parts.append)) is None:
            self.arguments(value_of("".join(parts), kinds))
            raise Truncated
        text = "".join(parts)
        if (yield from self._closes()):
            yield from reader.expect(f"{key}>")
            empty = {"array": "[]", "object": "{}"}.get(next(iter(kinds), "") if len(kinds) == 1 else "")
            self.arguments(empty if empty and not text.strip() else value_of(text, kinds))
            return
        if text.strip():
            raise Broken
        first = yield from self._key()
        as_list = "array" in kinds or (first == _ITEM and "object" not in kinds)
        yield from self._members(schema, key, depth + 1, first, as_list)


def _property(schema: Schema, key: str) -> Schema:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


def _items(schema: Schema) -> Schema:
    items = schema.get("items")
    return items if isinstance(items, dict) else {}
