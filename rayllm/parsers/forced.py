"""Answers that a grammar makes tool calls, whatever the format of the model's family is."""

from collections.abc import Sequence

from rayllm.parsers.literals import copy_value
from rayllm.parsers.parser import Json, ToolParser
from rayllm.parsers.reader import Broken, Reading, Truncated
from rayllm.parsers.tools_json import JsonToolParser


class RequiredCalls(JsonToolParser):
    """For `tool_choice` `required`: a list `[{"name": "f", "parameters": {}}]` of the request's tools."""

    openers = ("[",)

    def calls(self, opener: str) -> Reading[None]:
        """The list."""
        yield from self.calls_in_list(strict=True)


class NamedCall(ToolParser):
    """For a named function: its arguments alone, whose beginning is a call's already."""

    def __init__(self, tools: Sequence[Json], name: str) -> None:
        self._name = name
        super().__init__(tools)

    def read(self) -> Reading[None]:
        """Read the arguments. What goes wrong, or follows them, is content."""
        reader = self.reader
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            self.start(self._name)
            try:
                yield from copy_value(reader, self.arguments)
                self.end()
            except Truncated:
                self.drop_marks()
            except Broken:
                pass
        reader.rewind()
        yield from reader.rest(self.content)
        self._end_content()
