"""Tool calls written as calls of Python functions, and FunctionGemma's notation."""

import re
from typing import ClassVar

from rayllm.parsers.literals import PYTHON, Dialect, copy_value, quoted
from rayllm.parsers.parser import ToolParser
from rayllm.parsers.reader import Broken, Reading
from rayllm.parsers.registry import register_tool_parser

_IDENTIFIER = re.compile(r"[\w.\-]+")


class PythonicToolParser(ToolParser):
    """What these families share."""

    def call(self, strict: bool = False) -> Reading[None]:
        """Read `f(a=1, b="x")`.

        `strict` takes only tools of the request: for texts that no mark makes a call.

        Raises:
            Broken: it is none, or goes wrong.
        """
        reader = self.reader
        name = yield from reader.some(_IDENTIFIER)
        yield from reader.expect("(")
        if strict and name not in self.tools:
            raise Broken
        lead = "{"
        while True:
            yield from reader.space()
            if (yield from reader.literal(")")):
                break
            key = yield from reader.some(_IDENTIFIER)
            yield from reader.space()
            yield from reader.expect("=")
            yield from reader.space()
            if lead == "{":
                self.start(name)
            self.arguments(f"{lead}{quoted(key)}: ")
            lead = ", "
            yield from copy_value(reader, self.arguments, PYTHON)
            yield from reader.space()
            if (yield from reader.expect(",", ")")) == ")":
                break
        if lead == "{":
            self.start(name)
            self.arguments("{")
        self.arguments("}")
        self.end()


@register_tool_parser("pythonic")
class Pythonic(PythonicToolParser):
    """`[f(a=1), g(b="x")]`; only of tools that there are."""

    openers: ClassVar[tuple[str, ...]] = ("[",)
    closer: ClassVar[str] = ""

    def calls(self, opener: str) -> Reading[None]:
        """A list of calls."""
        reader = self.reader
        if opener != "[":
            yield from reader.space()
            yield from reader.expect("[")
        while True:
            yield from reader.space()
            yield from self.call(strict=opener == "[")
            yield from reader.space()
            if (yield from reader.expect(",", "]")) == "]":
                reader.mark()
                break
        if self.closer:
            yield from reader.space()
            if (yield from reader.literal(self.closer)):
                reader.mark()


@register_tool_parser("llama4_pythonic")
class Llama4(Pythonic):
    """The same, which may stand between marks."""

    openers = ("<|python_start|>", "[")
    closer = "<|python_end|>"
    markers = ("<|python_start|>", "<|python_end|>")


@register_tool_parser("olmo3")
class Olmo3(PythonicToolParser):
    """`<function_calls>`, a line `f(a=1)` for each call, `</function_calls>`."""

    openers = ("<function_calls>",)
    markers = ("<function_calls>", "</function_calls>")

    def calls(self, opener: str) -> Reading[None]:
        """The calls."""
        reader = self.reader
        while True:
            yield from reader.space()
            yield from self.call()
            yield from reader.space()
            if (yield from reader.literal("</function_calls>")):
                reader.mark()
                return


@register_tool_parser("functiongemma")
class FunctionGemma(ToolParser):
    """`<start_function_call>call:f{a:<escape>x<escape>,b:1}<end_function_call>`."""

    openers = ("<start_function_call>",)
    closer: ClassVar[str] = "<end_function_call>"
    markers = ("<start_function_call>", "<end_function_call>", "<escape>")
    dialect: ClassVar[Dialect] = Dialect(raw_quote="<escape>", bare_keys=True)

    def calls(self, opener: str) -> Reading[None]:
        """One call."""
        reader = self.reader
        yield from reader.expect("call:")
        name = yield from reader.some(_IDENTIFIER)
        if (yield from reader.peek()) != "{":
            raise Broken
        self.start(name)
        yield from copy_value(reader, self.arguments, self.dialect)
        self.end()
        yield from reader.space()
        yield from reader.expect(self.closer)
        reader.mark()


@register_tool_parser("gemma4")
class Gemma4(FunctionGemma):
    """The same under Gemma 4's marks."""

    openers = ("<|tool_call>",)
    closer = "<tool_call|>"
    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')
    dialect = Dialect(raw_quote='<|"|>', bare_keys=True)
