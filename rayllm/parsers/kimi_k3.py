"""Kimi K3's messages: parts that open and close by name, of reasoning, of the answer, and of calls.

`<|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...<|close|>response<|sep|><|open|>tools<|sep|>...`
"""

import re

from rayllm.parsers.literals import copy_value, quoted
from rayllm.parsers.parser import Parser, ReasoningParser, ToolParser
from rayllm.parsers.reader import Broken, Reading, Truncated
from rayllm.parsers.registry import register_reasoning_parser, register_tool_parser
from rayllm.parsers.tools_xml import value_of

_OPEN, _CLOSE, _SEP, _END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_MARKERS = (_OPEN, _CLOSE, _SEP, _END)
_TOOLS, _TOOLS_END = f"{_OPEN}tools{_SEP}", f"{_CLOSE}tools{_SEP}"
_FRAMES = tuple(f"{mark}{name}{_SEP}" for name in ("response", "message") for mark in (_OPEN, _CLOSE))
"""What stands around the answer, and is no part of it."""
_THINK, _THINK_END = f"{_OPEN}think{_SEP}", f"{_CLOSE}think{_SEP}"
_PARTS = (_TOOLS, _THINK, _THINK_END, *_FRAMES, _END)
_CALL = re.compile(r' tool="([^"]+)"(?: index="\d*")?')
_ARGUMENT = re.compile(r' key="([^"]*)"(?: type="(string|number|integer|boolean|null|object|array)")?')
_WHOLE = re.compile(r'(?: type="object")?')


def _read_parts(parser: Parser, thinking: bool) -> Reading[bool]:
    """Give out reasoning and content up to the first section of calls; false at the text's end."""
    reader = parser.reader
    parser.thinking = thinking
    while True:
        ends = (_THINK_END, _TOOLS) if parser.thinking else _PARTS
        found = yield from reader.through(ends, parser.reasoning if parser.thinking else parser.content)
        if found is None or found == _TOOLS:
            parser.thinking = False
            return found is not None
        parser.thinking = found == _THINK
        reader.mark()


@register_reasoning_parser("kimi_k3")
class KimiK3Reasoning(ReasoningParser):
    """The part `think` is reasoning. Calls stay as they are, for the tool parser."""

    begins = (_THINK,)
    ends = (_THINK_END,)
    ended_by = (_TOOLS,)
    markers = _MARKERS

    @classmethod
    def inside_after(cls, prompt: str, continued: str | None) -> bool | None:
        """By the part that the prompt ends with, or the last one of the message that goes on."""
        if continued is not None:
            return continued.rfind(_THINK) > continued.rfind(_THINK_END)
        tail = prompt.rstrip()
        return True if tail.endswith(_THINK) else False if tail.endswith(_FRAMES[0]) else None

    def read(self) -> Reading[None]:
        """Read the parts."""
        thinking = bool(self._inside)
        while (yield from _read_parts(self, thinking)):
            self.content(_TOOLS)
            self.content((yield from self.reader.through((_TOOLS_END,), self.content)) or "")
            thinking = False


@register_tool_parser("kimi_k3")
class KimiK3(ToolParser):
    """Calls with their arguments one by one, or as one JSON object. Reasoning is told apart too."""

    openers = (_TOOLS,)
    markers = _MARKERS

    def read(self) -> Reading[None]:
        """Read the parts, and the calls behind them."""
        while (yield from _read_parts(self, False)):
            calls = self._index
            try:
                yield from self.calls(_TOOLS)
            except Truncated:
                if self._index != calls:
                    self.drop_marks()
            except Broken:
                pass
            self.reader.rewind()
            if self._index == calls:
                self.content(self.reader.take())
        self._end_content()

    def calls(self, opener: str) -> Reading[None]:
        """The calls of a section."""
        reader = self.reader
        while True:
            yield from reader.space()
            if (yield from reader.expect(f"{_OPEN}call", _TOOLS_END)) == _TOOLS_END:
                reader.mark()
                return
            yield from self._call(_unescaped((yield from self._attributes(_CALL))[1]))

    def _call(self, name: str) -> Reading[None]:
        reader, lead = self.reader, "{"
        argument, whole, end = f"{_OPEN}argument", f"{_OPEN}json", f"{_CLOSE}call{_SEP}"
        self.start(name)
        while True:
            yield from reader.space()
            found = yield from reader.expect(argument, end, *((whole,) if lead == "{" else ()))
            if found == end:
                self.arguments("{}" if lead == "{" else "}")
                break
            attributes = yield from self._attributes(_ARGUMENT if found == argument else _WHOLE)
            if found == whole:
                yield from reader.space()
                if (yield from reader.peek()) != "{":
                    raise Broken
                yield from copy_value(reader, self.arguments)
                for mark in (f"{_CLOSE}json{_SEP}", end):
                    yield from reader.space()
                    yield from reader.expect(mark)
                break
            self.arguments(f"{lead}{quoted(_unescaped(attributes[1]))}: ")
            lead = ", "
            yield from self._argument(attributes[2] or "string")
        self.end()

    def _argument(self, kind: str) -> Reading[None]:
        """An argument up to its end; a string is given out as it comes."""
        ends = (f"{_CLOSE}argument{_SEP}",)
        if kind == "string":
            self.arguments('"')
            found = yield from self.reader.through(ends, lambda text: self.arguments(quoted(text)[1:-1]))
            if found is not None:
                self.arguments('"')
        else:
            parts: list[str] = []
            found = yield from self.reader.through(ends, parts.append)
            self.arguments(value_of("".join(parts), frozenset({kind})))
        if found is None:
            raise Truncated

    def _attributes(self, pattern: re.Pattern[str]) -> Reading[re.Match[str]]:
        """The attributes of a part, whose name has been read.

        Raises:
            Broken: they are others than the pattern's.
        """
        parts: list[str] = []
        found = yield from self.reader.through((_SEP, _OPEN, _CLOSE), parts.append)
        attributes = pattern.fullmatch("".join(parts))
        if found is None:
            raise Truncated
        if found != _SEP or attributes is None:
            raise Broken
        return attributes


def _unescaped(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
