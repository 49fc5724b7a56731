"""Apertus: calls as JSON objects whose only key is the name of the function."""

from rayllm.parsers.literals import read_string
from rayllm.parsers.reader import Broken, Reading
from rayllm.parsers.registry import register_tool_parser
from rayllm.parsers.tools_json import JsonToolParser


@register_tool_parser("apertus")
class Apertus(JsonToolParser):
    """`<|tools_prefix|>[{"f": {}}]<|tools_suffix|>`: the name is the key of the arguments."""

    openers = ("<|tools_prefix|>",)
    markers = ("<|tools_prefix|>", "<|tools_suffix|>")

    def calls(self, opener: str) -> Reading[None]:
        """The list."""
        reader = self.reader
        yield from reader.space()
        yield from reader.expect("[")
        more = True
        while more:
            yield from reader.space()
            yield from reader.expect("{")
            yield from reader.space()
            name = yield from read_string(reader)
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            if not name or (yield from reader.peek()) != "{":
                raise Broken
            yield from self.value(name)
            yield from reader.space()
            yield from reader.expect("}")
            yield from reader.space()
            more = (yield from reader.expect(",", "]")) == ","
        yield from self.close("<|tools_suffix|>")
