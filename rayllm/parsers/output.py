"""The way of an answer through its parsers: reasoning first, then, in what is left, tool calls."""

from collections.abc import Iterable

from rayllm.parsers.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from rayllm.parsers.parser import ReasoningParser, ToolParser


class OutputParser:
    """Parses one answer by one or two parsers."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        show_reasoning: bool = True,
        parallel_calls: bool = True,
    ) -> None:
        """`show_reasoning` false leaves reasoning out, `parallel_calls` false all calls but the first."""
        self._reasoning, self._tools = reasoning, tools
        self._show_reasoning, self._parallel_calls = show_reasoning, parallel_calls
        self.calls_begun = 0
        self.calls_ended = 0

    @property
    def thinking(self) -> bool:
        """Whether the text that comes now is reasoning."""
        parsers = (self._reasoning, self._tools)
        return any(parser is not None and parser.thinking for parser in parsers)

    def feed(self, text: str) -> list[Event]:
        """The events that more text makes certain."""
        if self._reasoning is None:
            return self._out(self._of_tools([Content(text)]))
        return self._out(self._of_tools(self._reasoning.feed(text)))

    def finish(self) -> list[Event]:
        """The last events, now that no more text comes."""
        events = self._of_tools(self._reasoning.finish()) if self._reasoning is not None else []
        return self._out(events + (self._tools.finish() if self._tools is not None else []))

    def _of_tools(self, events: Iterable[Event]) -> list[Event]:
        if self._tools is None:
            return list(events)
        out: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                out += self._tools.feed(event.text)
            else:
                out.append(event)
        return out

    def _out(self, events: Iterable[Event]) -> list[Event]:
        """The events that are to be shown; counts calls."""
        shown = []
        for event in events:
            match event:
                case Reasoning():
                    if not self._show_reasoning:
                        continue
                case CallStart(index) | CallArguments(index) | CallEnd(index):
                    if index and not self._parallel_calls:
                        continue
                    self.calls_begun += isinstance(event, CallStart)
                    self.calls_ended += isinstance(event, CallEnd)
            shown.append(event)
        return shown
