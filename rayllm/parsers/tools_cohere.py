"""Cohere's Command: calls as JSON objects whose keys have names of their own."""

from rayllm.parsers.reader import Reading
from rayllm.parsers.registry import register_tool_parser
from rayllm.parsers.tools_json import JsonToolParser


@register_tool_parser("cohere_command3", "cohere_command4")
class CohereCommand(JsonToolParser):
    """A list of calls between marks, `{"tool_call_id": "0", "tool_name": "f", "parameters": {}}`."""

    name_key = "tool_name"
    id_key = "tool_call_id"
    no_others = True
    openers = ("<|START_ACTION|>",)
    markers = ("<|START_ACTION|>", "<|END_ACTION|>")

    def calls(self, opener: str) -> Reading[None]:
        """The list, or a single call."""
        yield from self.reader.space()
        if (yield from self.reader.literal("[")):
            yield from self.calls_in_list()
        else:
            yield from self.call()
        yield from self.close("<|END_ACTION|>")
