"""Inkling's messages: each of one kind of content, reasoning, text or a call.

`<|message_model|><|content_text|>Good day.<|end_message|>`; the first `<|message_model|>` is the end of the prompt.
"""

import re
from collections.abc import Sequence

from rayllm.parsers.parser import Json, Parser, ReasoningParser
from rayllm.parsers.reader import Broken, Reading, Truncated
from rayllm.parsers.registry import register_reasoning_parser, register_tool_parser
from rayllm.parsers.tools_json import JsonToolParser

_MESSAGE, _THINKING, _TEXT, _CALL = (
    "<|message_model|>", "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>",
)  # fmt: skip
_ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")
_MARKERS = (_MESSAGE, _THINKING, _TEXT, _CALL, *_ENDS)
_NAME = re.compile(r"[\w.\-/:]*")


class _Messages:
    """Reads messages for a parser of either kind."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._first = True
        self.header = ""
        """The name of a tool before a call."""

    def next(self) -> Reading[str | None]:
        """The kind of the next message, whose content comes next; None at the end. What belongs to none is content."""
        reader, content = self._parser.reader, self._parser.content
        while True:
            first, self._first = self._first, False
            if first:
                pass
            elif (found := (yield from reader.through((_MESSAGE, *_ENDS), content))) is None:
                return None
            elif found in _ENDS:
                reader.mark()
                continue
            try:
                if first:
                    yield from reader.literal(_MESSAGE)
                return (yield from self._kind())
            except Broken:
                reader.rewind()
                if not first:
                    content(reader.take())

    def body(self) -> Reading[None]:
        """Give out the content of a message that is no call."""
        reader, parser = self._parser.reader, self._parser
        reader.mark()
        give = parser.reasoning if parser.thinking else parser.content
        if (yield from reader.through((*_ENDS, _MESSAGE), give)) == _MESSAGE:
            reader.rewind()
        reader.mark()
        parser.thinking = False

    def _kind(self) -> Reading[str]:
        reader = self._parser.reader
        self.header = yield from reader.run(_NAME)
        kind = yield from reader.expect(*((_CALL,) if self.header else (_THINKING, _TEXT, _CALL)))
        self._parser.thinking = kind == _THINKING
        return kind


@register_reasoning_parser("inkling")
class InklingReasoning(ReasoningParser):
    """Thoughts are reasoning. Calls stay as they are, for the tool parser."""

    begins = (_THINKING,)
    ends = (_ENDS[0],)
    markers = _MARKERS

    def __init__(self, inside: bool | None = None) -> None:
        super().__init__(inside)
        self._messages = _Messages(self)

    def read(self) -> Reading[None]:
        """Read the messages."""
        reader = self.reader
        while (kind := (yield from self._messages.next())) is not None:
            if kind == _CALL:
                header = reader.ungiven
                self.content(header if header.startswith(_MESSAGE) else f"{_MESSAGE}{header}")
                self.content((yield from reader.through(_ENDS, self.content)) or "")
            else:
                yield from self._messages.body()


@register_tool_parser("inkling")
class Inkling(JsonToolParser):
    """`<|content_invoke_tool_json|>{"name": "f", "args": {}}`. Thoughts are told apart too."""

    argument_keys = ("args",)
    markers = _MARKERS

    def __init__(self, tools: Sequence[Json] = ()) -> None:
        super().__init__(tools)
        self._messages = _Messages(self)

    def read(self) -> Reading[None]:
        """Read the messages."""
        reader = self.reader
        while (kind := (yield from self._messages.next())) is not None:
            if kind != _CALL:
                yield from self._messages.body()
                continue
            calls = self._index
            try:
                yield from reader.space()
                yield from self.call()
                yield from self.close(*_ENDS)
            except Truncated:
                if self._index != calls:
                    self.drop_marks()
            except Broken:
                pass
            reader.rewind()
            if self._index == calls:
                self.content(reader.take())
        self._end_content()

    def start(self, name: str, id_: str | None = None) -> None:
        """Begin a call. The name before it says the same; if not, it is shown."""
        if self._messages.header not in ("", name):
            self.content(self._messages.header)
        super().start(name, id_)
