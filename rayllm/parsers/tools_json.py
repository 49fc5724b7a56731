"""Tool calls written as JSON objects with a name and arguments, between the marks of each family."""

import json
import random
import re
import string
from typing import ClassVar

from rayllm.parsers.literals import copy_value, read_string, read_value, unquoted
from rayllm.parsers.parser import ToolParser
from rayllm.parsers.reader import Broken, Reading
from rayllm.parsers.registry import register_tool_parser

_NAME = re.compile(r"[\w.\-/]+")
_KIMI_ID = re.compile(r"[\w.\-/:]+")
_ARGUMENTS = ("arguments", "parameters")


class JsonToolParser(ToolParser):
    """What these families share."""

    name_key: ClassVar[str] = "name"
    id_key: ClassVar[str] = "id"
    no_others: ClassVar[bool] = False
    """Whether an object with other keys is no call."""

    def call(self, strict: bool = False) -> Reading[None]:
        """Read an object with a name and arguments.

        `strict` takes only tools of the request and objects without other keys: for texts that no mark makes a call.

        Raises:
            Broken: it is none, or goes wrong.
        """
        reader = self.reader
        name: str | None = None
        id_: str | None = None
        waiting: str | None = None
        done = odd = False
        closing = yield from self._open_object()
        while not closing:
            yield from reader.space()
            key = yield from read_string(reader)
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            if key == self.name_key and name is None:
                name = yield from read_string(reader)
                if not name or (strict and name not in self.tools):
                    raise Broken
                if waiting is not None:
                    self._whole(name, waiting, id_)
                    done = True
            elif key in _ARGUMENTS and not done and waiting is None:
                if name is None:
                    waiting = yield from read_value(reader)
                else:
                    yield from self.value(name, id_)
                    done = True
            else:
                value = yield from read_value(reader)
                if key == self.id_key and value.startswith('"') and not done:
                    id_ = unquoted(value)
                elif (key, value) != ("type", '"function"'):
                    odd = True
                    if strict or self.no_others:
                        raise Broken
            yield from reader.space()
            closing = (yield from reader.expect(",", "}")) == "}"
        if not done:
            if name is None or odd:
                raise Broken
            self._whole(name, "{}", id_)
        reader.mark()

    def calls_in_list(self, strict: bool = False) -> Reading[None]:
        """Read a list of such objects, behind its opening bracket.

        Raises:
            Broken: it is none, or goes wrong.
        """
        reader = self.reader
        while True:
            yield from reader.space()
            yield from self.call(strict)
            yield from reader.space()
            if (yield from reader.expect(",", "]")) == "]":
                reader.mark()
                return

    def value(self, name: str, id_: str | None = None) -> Reading[None]:
        """Read the arguments of a call: an object, or a string that holds one."""
        first = yield from self.reader.peek()
        if first == "{":
            self.start(name, id_)
            yield from copy_value(self.reader, self.arguments)
            self.end()
        else:
            self._whole(name, (yield from read_value(self.reader)), id_)

    def close(self, *marks: str) -> Reading[None]:
        """Read what closes the calls.

        Raises:
            Broken: something else comes.
        """
        yield from self.reader.space()
        yield from self.reader.expect(*marks)
        self.reader.mark()

    def _open_object(self) -> Reading[bool]:
        """Read an opening bracket; true if the object is empty."""
        yield from self.reader.expect("{")
        yield from self.reader.space()
        return bool((yield from self.reader.literal("}")))

    def _whole(self, name: str, arguments: str, id_: str | None = None) -> None:
        self.start(name, id_)
        self.arguments(_object_in(arguments))
        self.end()


def _object_in(arguments: str) -> str:
    """The object that arguments mean: themselves, the text of a string, or an empty one."""
    if arguments == "null":
        return "{}"
    if arguments.startswith('"'):
        text = unquoted(arguments)
        try:
            if isinstance(json.loads(text), dict):
                return text
        except (ValueError, RecursionError):
            pass
    return arguments


@register_tool_parser("hermes", "ernie45", "granite4")
class Hermes(JsonToolParser):
    """`<tool_call>{"name": "f", "arguments": {}}</tool_call>`, again for each call."""

    openers = ("<tool_call>",)
    closer: ClassVar[str] = "</tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    def calls(self, opener: str) -> Reading[None]:
        """One call."""
        yield from self.reader.space()
        yield from self.call()
        yield from self.close(self.closer)


@register_tool_parser("longcat")
class LongCat(Hermes):
    """As Hermes, under marks of its own."""

    openers = ("<longcat_tool_call>",)
    closer = "</longcat_tool_call>"
    markers = (*openers, closer)


@register_tool_parser("internlm")
class InternLM(JsonToolParser):
    """`<|action_start|><|plugin|>{"name": "f", "parameters": {}}<|action_end|>`."""

    openers = ("<|action_start|>",)
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")

    def calls(self, opener: str) -> Reading[None]:
        """One call."""
        yield from self.reader.space()
        yield from self.reader.expect("<|plugin|>")
        yield from self.reader.space()
        yield from self.call()
        yield from self.close("<|action_end|>")


@register_tool_parser("granite")
class Granite(JsonToolParser):
    """`<|tool_call|>[{"name": "f", "arguments": {}}]`, with `<tool_call>` in older models."""

    openers = ("<|tool_call|>", "<tool_call>")
    markers = (*openers, "</tool_call>")

    def calls(self, opener: str) -> Reading[None]:
        """A list of calls, or one alone."""
        yield from self.reader.space()
        if (yield from self.reader.literal("[")):
            yield from self.calls_in_list()
        else:
            yield from self.call()
        yield from self.reader.space()
        if (yield from self.reader.literal("</tool_call>")):
            self.reader.mark()


@register_tool_parser("granite-20b-fc")
class Granite20B(JsonToolParser):
    """`<function_call> {"name": "f", "arguments": {}}`, again for each call."""

    openers = ("<function_call>",)
    markers = openers

    def calls(self, opener: str) -> Reading[None]:
        """One call."""
        yield from self.reader.space()
        yield from self.call()


@register_tool_parser("jamba", "hunyuan_a13b")
class Jamba(JsonToolParser):
    """`<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>`."""

    openers = ("<tool_calls>",)
    markers = ("<tool_calls>", "</tool_calls>")

    def calls(self, opener: str) -> Reading[None]:
        """A list of calls."""
        yield from self.reader.space()
        yield from self.reader.expect("[")
        yield from self.calls_in_list()
        yield from self.close("</tool_calls>")


@register_tool_parser("minimax")
class MiniMax(JsonToolParser):
    """`<tool_calls>`, a line `{"name": "f", "arguments": {}}` for each call, `</tool_calls>`."""

    openers = ("<tool_calls>",)
    markers = ("<tool_calls>", "</tool_calls>")

    def calls(self, opener: str) -> Reading[None]:
        """The calls."""
        while True:
            yield from self.reader.space()
            yield from self.call()
            yield from self.reader.space()
            if (yield from self.reader.literal("</tool_calls>")):
                self.reader.mark()
                return


@register_tool_parser("phi4_mini_json", "phi4_mini")
class Phi4Mini(JsonToolParser):
    """`functools[{"name": "f", "arguments": {}}]`."""

    openers = ("functools[",)

    def calls(self, opener: str) -> Reading[None]:
        """A list of calls."""
        yield from self.calls_in_list()


@register_tool_parser("llama3_json", "llama4_json")
class Llama(JsonToolParser):
    """`{"name": "f", "parameters": {}}`, after `<|python_tag|>` or bare; `;` between calls."""

    openers = ("<|python_tag|>", "{")
    markers = ("<|python_tag|>",)

    def calls(self, opener: str) -> Reading[None]:
        """Calls. Bare objects are calls only of tools that there are."""
        reader, bare = self.reader, opener == "{"
        if bare:
            reader.rewind()
        while True:
            yield from reader.space()
            yield from self.call(strict=bare)
            yield from reader.space()
            if not (yield from reader.literal(";")):
                return


@register_tool_parser("xlam")
class XLam(JsonToolParser):
    """`[{"name": "f", "arguments": {}}]`, bare, in a block of code, or after a mark; only of tools that there are."""

    openers = ("```", "[TOOL_CALLS]", "<tool_call>", "[")
    markers = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>")

    def calls(self, opener: str) -> Reading[None]:
        """A list of calls."""
        reader = self.reader
        if opener != "[":
            if opener == "```":
                yield from reader.literal("json")
            yield from reader.space()
            yield from reader.expect("[")
        yield from self.calls_in_list(strict=True)
        closer = {"```": "```", "<tool_call>": "</tool_call>"}.get(opener)
        if closer:
            yield from self.close(closer)


@register_tool_parser("mistral")
class Mistral(JsonToolParser):
    """`[TOOL_CALLS]` before a list of calls, or, in newer models, before each: `[TOOL_CALLS]f[ARGS]{}`."""

    openers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def calls(self, opener: str) -> Reading[None]:
        """A list of calls, or one call."""
        reader = self.reader
        yield from reader.space()
        if (yield from reader.literal("[")):
            yield from self.calls_in_list()
            return
        if (yield from reader.peek()) == "{":
            yield from self.call()
            return
        name = yield from reader.some(_NAME)
        id_ = None
        if (yield from reader.literal("[CALL_ID]")):
            id_ = yield from reader.some(_NAME)
        yield from reader.literal("[ARGS]")
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            raise Broken
        yield from self.value(name, id_)

    def new_id(self) -> str:
        """Nine letters and digits, which Mistral's chat templates insist on."""
        return "".join(random.choices(string.ascii_letters + string.digits, k=9))


class Sections(JsonToolParser):
    """Calls of some form between the marks of a section; `one` reads a call behind its opening mark."""

    section: ClassVar[tuple[str, str]]
    call_opener: ClassVar[str]

    def calls(self, opener: str) -> Reading[None]:
        """The calls of a section, or those after a call's mark without one."""
        reader, (opening, closing) = self.reader, self.section
        if opener == opening:
            yield from reader.space()
            yield from reader.expect(self.call_opener)
        while True:
            yield from self.one()
            yield from reader.space()
            found = yield from reader.literal(self.call_opener, closing)
            if found == closing:
                reader.mark()
            if found != self.call_opener:
                return

    def one(self) -> Reading[None]:
        """Read a call.

        Raises:
            Broken: it is none, or goes wrong.
        """
        raise NotImplementedError

    def object(self, name: str, id_: str | None = None) -> Reading[None]:
        """Read the object of a call's arguments."""
        yield from self.reader.space()
        if (yield from self.reader.peek()) != "{":
            raise Broken
        yield from self.value(name, id_)


@register_tool_parser("gigachat3")
class GigaChat3(JsonToolParser):
    """One call behind a mark, or in a message of its own role."""

    openers = ("<|function_call|>", "function call<|role_sep|>")
    markers = ("<|function_call|>", "<|role_sep|>")

    def calls(self, opener: str) -> Reading[None]:
        """The call."""
        yield from self.reader.space()
        yield from self.call()


@register_tool_parser("deepseek_v3")
class DeepSeekV3(Sections):
    """Name and arguments in a block of code, between DeepSeek's marks."""

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call_opener = "<｜tool▁call▁begin｜>"
    openers = (section[0], call_opener)
    markers = (*section, call_opener, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")

    def one(self) -> Reading[None]:
        """`function<｜tool▁sep｜>f`, and the arguments."""
        reader = self.reader
        yield from reader.expect("function")
        yield from reader.expect("<｜tool▁sep｜>")
        name = yield from reader.some(_NAME)
        yield from reader.space()
        yield from reader.expect("```json")
        yield from self.object(name)
        yield from self.close("```")
        yield from self.close("<｜tool▁call▁end｜>")


@register_tool_parser("deepseek_v31")
class DeepSeekV31(DeepSeekV3):
    """Name and arguments as they are, between the same marks."""

    def one(self) -> Reading[None]:
        """`f<｜tool▁sep｜>{}`."""
        name = yield from self.reader.some(_NAME)
        yield from self.reader.expect("<｜tool▁sep｜>")
        yield from self.object(name)
        yield from self.close("<｜tool▁call▁end｜>")


@register_tool_parser("kimi_k2")
class KimiK2(Sections):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>`; the name is the call's id."""

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call_opener = "<|tool_call_begin|>"
    openers = (section[0], call_opener)
    markers = (*section, call_opener, "<|tool_call_argument_begin|>", "<|tool_call_end|>")

    def one(self) -> Reading[None]:
        """Id and arguments."""
        reader = self.reader
        yield from reader.space()
        id_ = yield from reader.some(_KIMI_ID)
        yield from reader.space()
        yield from reader.expect("<|tool_call_argument_begin|>")
        yield from self.object(id_.removeprefix("functions.").rpartition(":")[0] or id_, id_)
        yield from self.close("<|tool_call_end|>")
