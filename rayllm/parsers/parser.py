"""What all parsers are: one object for each answer, text in, events out."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rayllm.parsers.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, joined
from rayllm.parsers.reader import Broken, Reader, Reading, Truncated

Json = dict[str, Any]


class Parser:
    """Parses one answer. A subclass writes `read`, a generator over `reader`, which must come to the text's end."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts of special tokens that it has to see, which are otherwise left out of answers."""

    def __init__(self) -> None:
        self.reader = Reader()
        self.thinking = False
        """Whether the text that comes now is reasoning."""
        self._events: list[Event] = []
        self._reading = self.read()

    def feed(self, text: str) -> list[Event]:
        """The events that more text makes certain."""
        if text:
            self.reader.push(text)
            next(self._reading, None)
        return self._taken()

    def finish(self) -> list[Event]:
        """The last events, now that no more text comes."""
        self.reader.end()
        next(self._reading, None)
        return self._taken()

    def read(self) -> Reading[None]:
        """Read the whole text."""
        raise NotImplementedError

    def content(self, text: str) -> None:
        """Give out text for the user."""
        if text:
            self.emit(Content(text))

    def reasoning(self, text: str) -> None:
        """Give out text of the model's thoughts."""
        self.emit(Reasoning(text))

    def emit(self, event: Event) -> None:
        """Give out an event. All that has been read counts as given out."""
        self.reader.mark()
        self._events.append(event)

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return joined(events) if len(events) > 1 else events


class ReasoningParser(Parser):
    """Parts an answer into reasoning and content."""

    def __init__(self, inside: bool | None = None) -> None:
        """`inside` says whether the prompt ends within the reasoning; None: it does not show."""
        self._inside = inside
        super().__init__()

    @classmethod
    def inside_after(cls, prompt: str, continued: str | None) -> bool | None:
        """What `inside` is after a prompt.

        `prompt` is its end, `continued` the text of the message that the answer goes on with, if it does.
        """
        return None


class ToolParser(Parser):
    """Parts an answer into content and tool calls. A subclass names `openers` and writes `calls`."""

    openers: ClassVar[tuple[str, ...]] = ()
    """Texts with which calls begin."""

    def __init__(self, tools: Sequence[Json] = ()) -> None:
        """`tools` are those of the request, as OpenAI's API has them."""
        functions = [tool["function"] for tool in tools]
        self.tools: dict[str, Json] = {each["name"]: each.get("parameters") or {} for each in functions}
        """The JSON schema of the parameters of each tool."""
        self._index = -1
        self._ids: set[str] = set()
        self._spoken = False
        self._held = ""
        super().__init__()

    def read(self) -> Reading[None]:
        """Look for calls. What begins like one and is none becomes content."""
        reader = self.reader
        while (opener := (yield from reader.through(self.openers, self.content))) is not None:
            calls = self._index
            try:
                yield from self.calls(opener)
            except Truncated:
                # The closing marks of a call that was cut are no content.
                if self._index != calls and not any(map(str.isalnum, reader.ungiven)):
                    reader.drop()
            except Broken:
                pass
            reader.rewind()
            if self._index == calls:
                self.content(reader.take())
        self._end_content()

    def calls(self, opener: str) -> Reading[None]:
        """Read the calls that an opener begins, by `start`, `arguments` and `end`.

        Raises:
            Broken: they are none, or go wrong; what was read since the last event becomes content.
        """
        raise NotImplementedError

    def content(self, text: str) -> None:
        """Give out text for the user. White space around calls is left out, but for that between two contents."""
        held = self._held + text
        shown = held.rstrip()
        self._held = held[len(shown) :]
        if shown:
            super().content(shown if self._spoken or self._index < 0 else shown.lstrip())
            self._spoken = True
        else:
            self.reader.mark()

    def start(self, name: str, id_: str | None = None) -> None:
        """Begin a call; an id is made where there is none of its own."""
        self._index += 1
        unique = id_ if id_ and id_ not in self._ids else self.new_id()
        self._ids.add(unique)
        self.emit(CallStart(self._index, unique, name))

    def arguments(self, text: str) -> None:
        """Give out more of the JSON text of the call's arguments."""
        self.emit(CallArguments(self._index, text))

    def end(self) -> None:
        """The call's arguments are complete."""
        self.emit(CallEnd(self._index))

    def new_id(self) -> str:
        """An id for a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def schema(self, name: str, parameter: str) -> Mapping[str, Any] | None:
        """The JSON schema of a parameter, None if the tool has none."""
        properties = self.tools.get(name, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        return schema if isinstance(schema, dict) else None

    def _end_content(self) -> None:
        if self._held and self._index < 0:
            super().content(self._held)
