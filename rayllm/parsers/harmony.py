"""Harmony, the format of gpt-oss: messages on channels, of reasoning, of calls, and for the user."""

import re
from collections.abc import Sequence

from rayllm.parsers.literals import copy_value
from rayllm.parsers.parser import Json, ReasoningParser, ToolParser
from rayllm.parsers.reader import Broken, Emit, Reader, Reading, Truncated
from rayllm.parsers.registry import register_reasoning_parser, register_tool_parser

_WORDS = re.compile(r"[\w .:=/-]*")
_ROLE = re.compile(r"(?:assistant)?(?: ?to=(?P<to>[\w.:/-]+))? ?")
_CHANNEL = re.compile(r"(?P<channel>analysis|commentary|final)(?: to=(?P<to>[\w.:/-]+))?(?: ?(?:json|code))? ?")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *_ENDS)
_FUNCTIONS = "functions."


def _read_header(reader: Reader) -> Reading[tuple[str, str]]:
    """The channel and the recipient of a message, whose text comes next.

    Raises:
        Broken: no message begins here.
    """
    yield from reader.literal("<|start|>")
    role = _ROLE.fullmatch((yield from reader.run(_WORDS)))
    yield from reader.expect("<|channel|>")
    channel = _CHANNEL.fullmatch((yield from reader.run(_WORDS)))
    if role is None or channel is None:
        raise Broken
    if (yield from reader.expect("<|constrain|>", "<|message|>")) == "<|constrain|>":
        yield from reader.expect("json", "code")
        yield from reader.space()
        yield from reader.expect("<|message|>")
    return channel["channel"], channel["to"] or role["to"] or ""


class _Messages:
    """Reads messages for a parser of either kind."""

    def __init__(self, reader: Reader, content: Emit) -> None:
        self._reader, self._content = reader, content
        self._first = True

    def next(self) -> Reading[tuple[str, str] | None]:
        """Channel and recipient of the next message; text that belongs to none is content. None at the end."""
        reader = self._reader
        while True:
            if self._first:
                self._first = False
                if not (yield from self._begins()):
                    continue
            elif (yield from reader.through(("<|start|>", "<|channel|>"), self._content)) is None:
                return None
            reader.rewind()
            try:
                return (yield from _read_header(reader))
            except Broken:
                reader.rewind()
                self._content(reader.take())

    def body(self, emit: Emit) -> Reading[None]:
        """Emit the text of a message."""
        reader = self._reader
        reader.mark()
        if (yield from reader.through((*_ENDS, "<|start|>"), emit)) == "<|start|>":
            reader.rewind()
        reader.mark()

    def _begins(self) -> Reading[bool]:
        """Whether the answer begins with a message, whose `<|start|>assistant` is the end of the prompt."""
        try:
            found = yield from self._reader.literal("<|start|>", "<|channel|>", " to=", "to=")
        except Truncated:
            found = ""
        self._reader.rewind()
        return bool(found)


@register_tool_parser("openai")
class Harmony(ToolParser):
    """Calls are messages to functions. Reasoning is told apart too, where no reasoning parser has done so before."""

    markers = _MARKERS

    def __init__(self, tools: Sequence[Json] = ()) -> None:
        super().__init__(tools)
        self._messages = _Messages(self.reader, self.content)

    def read(self) -> Reading[None]:
        """Read the messages."""
        while (message := (yield from self._messages.next())) is not None:
            channel, recipient = message
            name = recipient.removeprefix(_FUNCTIONS)
            if name and (name != recipient or name in self.tools):
                yield from self._call(name)
                continue
            if recipient:
                self.content(self.reader.ungiven)
            self.thinking = channel == "analysis" and not recipient
            yield from self._messages.body(self.reasoning if self.thinking else self.content)
            self.thinking = False
        self._end_content()

    def _call(self, name: str) -> Reading[None]:
        reader = self.reader
        self.start(name)
        try:
            yield from reader.space()
            if (yield from reader.literal(*_ENDS)):
                self.arguments("{}")
                self.end()
                return
            yield from copy_value(reader, self.arguments)
            self.end()
            yield from reader.space()
            yield from reader.expect(*_ENDS)
            reader.mark()
        except Truncated:
            reader.drop()
        except Broken:
            reader.rewind()
            yield from self._messages.body(self.content)


@register_reasoning_parser("openai_gptoss", "GptOss", "gpt_oss")
class HarmonyReasoning(ReasoningParser):
    """Messages on the channel `analysis` are reasoning. Calls stay as they are, for the tool parser."""

    markers = _MARKERS

    def __init__(self, inside: bool | None = None) -> None:
        super().__init__(inside)
        self._messages = _Messages(self.reader, self.content)

    def read(self) -> Reading[None]:
        """Read the messages."""
        reader = self.reader
        while (message := (yield from self._messages.next())) is not None:
            channel, recipient = message
            if recipient:
                header = reader.ungiven
                self.content(header if header.startswith("<|start|>") else f"<|start|>assistant{header}")
                self.content((yield from reader.through(_ENDS, self.content)) or "")
                continue
            self.thinking = channel == "analysis"
            yield from self._messages.body(self.reasoning if self.thinking else self.content)
            self.thinking = False
