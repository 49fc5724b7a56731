"""Tool calls written as elements, one for each parameter. Their texts become JSON by the schema of the tool."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayllm.parsers.literals import json_of, quoted
from rayllm.parsers.parser import ToolParser
from rayllm.parsers.reader import Broken, Reading, Truncated
from rayllm.parsers.registry import register_tool_parser

_NAME = re.compile(r"[^<>\"'\s=]+")
_ATTRIBUTES = re.compile(r"[^<>\n]*")
_STRING = re.compile(r' *string="(true|false)"')
_TYPES = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null", '"': "string"}
"""Of JSON texts, by their first character; others are numbers."""


@dataclass(frozen=True, slots=True)
class Form:
    """The marks of a family. A call begins with `call`, its name and `call_header`, and so do its parameters."""

    call: str
    call_header: str
    call_end: str
    parameter: str
    parameter_header: str
    parameter_end: str
    section: tuple[str, str] = ("", "")
    """Around calls."""
    before_call: str = ""
    after_call: str = ""
    attributes: bool = False
    """Whether a parameter's name ends with a quote, behind which `string="true"` or `string="false"` may stand."""
    value: str = ""
    """What stands between a parameter's header and its value."""
    raw: tuple[str, str] | None = None
    """Marks around values that may hold other marks."""
    padded: bool = True
    """Whether a line break at either end of a value is not its own."""


class XmlToolParser(ToolParser):
    """Reads calls by their `form`."""

    form: Form

    def calls(self, opener: str) -> Reading[None]:
        """The calls of a section, or those after a call's mark without one."""
        reader, form = self.reader, self.form
        begin = form.before_call or form.call
        if opener == form.section[0]:
            yield from reader.space()
            yield from reader.expect(begin)
        while True:
            if form.before_call:
                yield from reader.expect(form.call)
            yield from self._call()
            if form.after_call:
                yield from reader.space()
                yield from reader.expect(form.after_call)
                reader.mark()
            yield from reader.space()
            found = yield from reader.literal(*filter(None, (begin, form.section[1])))
            if found == form.section[1]:
                reader.mark()
            if found != begin:
                return

    def _call(self) -> Reading[None]:
        """A call behind its mark."""
        reader, form = self.reader, self.form
        name = yield from reader.some(_NAME)
        if form.call_header:
            yield from reader.space()
            yield from reader.expect(form.call_header)
        lead, started = "{", False
        while True:
            yield from reader.space()
            found = yield from reader.expect(form.parameter, form.call_end)
            if not started:
                self.start(name)
                started = True
            if found == form.call_end:
                self.arguments("{}" if lead == "{" else "}")
                self.end()
                return
            key = yield from reader.some(_NAME)
            string = yield from self._attributes()
            yield from reader.space()
            yield from reader.expect(form.parameter_header)
            if form.value:
                yield from reader.space()
                yield from reader.expect(form.value)
            self.arguments(f"{lead}{quoted(key)}: ")
            lead = ", "
            schema = self.schema(name, key)
            kinds = frozenset() if schema is None else kinds_of(schema)
            yield from self._value(kinds if string is None else frozenset({"string"} if string else ()))

    def _attributes(self) -> Reading[bool | None]:
        """Whether a parameter is a string, as its attributes say, and None if they do not."""
        if not self.form.attributes:
            return None
        yield from self.reader.expect('"')
        attributes = yield from self.reader.run(_ATTRIBUTES)
        found = _STRING.fullmatch(attributes)
        if attributes and found is None:
            raise Broken
        return None if found is None else found[1] == "true"

    def _value(self, kinds: frozenset[str]) -> Reading[None]:
        """A value up to its end. Strings are given out as they come."""
        reader, form = self.reader, self.form
        ends: tuple[str, ...] = (form.parameter_end,)
        raw = form.raw is not None and bool((yield from reader.literal(form.raw[0])))
        if form.raw is not None and raw:
            ends = (form.raw[1],)
        elif form.padded:
            yield from reader.literal("\n")
            ends = (f"\n{form.parameter_end}", form.parameter_end)
        if kinds == {"string"}:
            self.arguments('"')
            found = yield from reader.through(ends, lambda text: self.arguments(quoted(text)[1:-1]))
            if found is not None:
                self.arguments('"')
        else:
            parts: list[str] = []
            found = yield from reader.through(ends, parts.append)
            self.arguments(value_of("".join(parts), kinds))
        if found is None:
            raise Truncated
        if raw:
            yield from reader.space()
            yield from reader.expect(form.parameter_end)


def kinds_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; none if it does not say."""
    kinds: set[str] = set()
    declared = schema.get("type")
    kinds.update(kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str))
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            if isinstance(branch, dict) and isinstance(branch.get("type"), str):
                kinds.add(branch["type"])
    values = schema.get("enum")
    if not kinds and isinstance(values, list) and all(isinstance(value, str) for value in values):
        kinds.add("string")
    return frozenset(kinds)


def value_of(text: str, kinds: frozenset[str]) -> str:
    """The JSON text that a parameter's text means; a string where it is no other value of its types."""
    value = json_of(text)
    if value is None:
        return quoted(text)
    kind = _TYPES.get(value[0], "number")
    fits = not kinds or kind in kinds or (kind == "number" and "integer" in kinds)
    return value if fits and kind != "string" else quoted(text)


@register_tool_parser("qwen3_coder", "qwen3_xml", "step3p5", "nemotron_v3", "mimo")
class Qwen3Coder(XmlToolParser):
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`."""

    form = Form(
        section=("<tool_call>", "</tool_call>"),
        call="<function=",
        call_header=">",
        call_end="</function>",
        parameter="<parameter=",
        parameter_header=">",
        parameter_end="</parameter>",
    )
    openers = ("<tool_call>", "<function=")
    markers = ("<tool_call>", "</tool_call>")


@register_tool_parser("seed_oss")
class SeedOss(XmlToolParser):
    """The same within `<seed:tool_call>`."""

    form = Form(
        section=("<seed:tool_call>", "</seed:tool_call>"),
        call="<function=",
        call_header=">",
        call_end="</function>",
        parameter="<parameter=",
        parameter_header=">",
        parameter_end="</parameter>",
    )
    openers = ("<seed:tool_call>", "<function=")
    markers = ("<seed:tool_call>", "</seed:tool_call>")


@register_tool_parser("minimax_m2")
class MiniMaxM2(XmlToolParser):
    """`<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>`."""

    form = Form(
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        call='<invoke name="',
        call_header='">',
        call_end="</invoke>",
        parameter='<parameter name="',
        parameter_header='">',
        parameter_end="</parameter>",
    )
    openers = ("<minimax:tool_call>",)
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")


@register_tool_parser("step3")
class Step3(XmlToolParser):
    """`<steptml:invoke name="f">` and `<steptml:parameter name="a">`, between Step's marks."""

    form = Form(
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        before_call="<｜tool_call_begin｜>",
        call='function<｜tool_sep｜><steptml:invoke name="',
        call_header='">',
        call_end="</steptml:invoke>",
        after_call="<｜tool_call_end｜>",
        parameter='<steptml:parameter name="',
        parameter_header='">',
        parameter_end="</steptml:parameter>",
    )
    openers = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>")
    markers = (*openers, "<｜tool_sep｜>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>")


def _marked(mark: str, section: str) -> Form:
    """The form of elements whose names stand behind a mark, and whose parameters say whether they are strings."""
    return Form(
        section=(f"<{mark}{section}>", f"</{mark}{section}>"),
        call=f'<{mark}invoke name="',
        call_header='">',
        call_end=f"</{mark}invoke>",
        parameter=f'<{mark}parameter name="',
        parameter_header=">",
        parameter_end=f"</{mark}parameter>",
        attributes=True,
        padded=False,
    )


@register_tool_parser("deepseek_v32")
class DeepSeekV32(XmlToolParser):
    """`<｜DSML｜invoke name="f">`, and parameters that say whether they are strings."""

    form = _marked("｜DSML｜", "function_calls")
    openers = (form.section[0], form.call)
    markers = ("｜DSML｜",)


@register_tool_parser("deepseek_v4")
class DeepSeekV4(XmlToolParser):
    """The same within `<｜DSML｜tool_calls>`."""

    form = _marked("｜DSML｜", "tool_calls")
    openers = (form.section[0], form.call)
    markers = ("｜DSML｜",)


@register_tool_parser("gigachat35")
class GigaChat35(XmlToolParser):
    """The same behind GigaChat's own mark."""

    form = _marked("｜GCML｜", "tool_calls")
    openers = (form.section[0], form.call)
    markers = (
        *form.section, "<｜GCML｜invoke", form.call_end, "<｜GCML｜parameter", form.parameter_end,
    )  # fmt: skip


@register_tool_parser("glm45", "glm47", "poolside_v1")
class Glm45(XmlToolParser):
    """`<tool_call>f`, `<arg_key>a</arg_key><arg_value>1</arg_value>` for each parameter, `</tool_call>`."""

    form = Form(
        call="<tool_call>",
        call_header="",
        call_end="</tool_call>",
        parameter="<arg_key>",
        parameter_header="</arg_key>",
        value="<arg_value>",
        parameter_end="</arg_value>",
    )
    openers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@register_tool_parser("hy_v3")
class HyV3(XmlToolParser):
    """`<tool_call>f<tool_sep>`, keys and values as GLM has them, `</tool_call>`; `:opensource` may follow all names."""

    openers = ("<tool_calls:opensource>", "<tool_call:opensource>", "<tool_calls>", "<tool_call>")
    markers = tuple(
        f"<{end}{name}{suffix}>"
        for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
        for end in ("", "/")
        for suffix in ("", ":opensource")
    )

    def calls(self, opener: str) -> Reading[None]:
        """The calls, all with the opener's suffix."""
        suffix = f"{opener.partition(':')[1]}{opener.partition(':')[2][:-1]}"
        self.form = Form(
            section=(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"),
            call=f"<tool_call{suffix}>",
            call_header=f"<tool_sep{suffix}>",
            call_end=f"</tool_call{suffix}>",
            parameter=f"<arg_key{suffix}>",
            parameter_header=f"</arg_key{suffix}>",
            value=f"<arg_value{suffix}>",
            parameter_end=f"</arg_value{suffix}>",
            padded=False,
        )
        yield from super().calls(opener)


@register_tool_parser("solar_open2")
class SolarOpen2(XmlToolParser):
    """`<|tool_call:start|>f`, `<|tool_arg:start|>a<|tool_arg:value|>1<|tool_arg:end|>`, `<|tool_call:end|>`."""

    form = Form(
        call="<|tool_call:start|>",
        call_header="",
        call_end="<|tool_call:end|>",
        parameter="<|tool_arg:start|>",
        parameter_header="<|tool_arg:value|>",
        parameter_end="<|tool_arg:end|>",
        padded=False,
    )
    openers = (form.call,)
    markers = (form.call, form.call_end, form.parameter, form.parameter_header, form.parameter_end)


@register_tool_parser("minicpm5")
class MiniCPM5(XmlToolParser):
    """`<function name="f"><param name="a">1</param></function>`; texts may stand in `<![CDATA[` and `]]>`."""

    form = Form(
        call='<function name="',
        call_header='">',
        call_end="</function>",
        parameter='<param name="',
        parameter_header='">',
        parameter_end="</param>",
        raw=("<![CDATA[", "]]>"),
    )
    openers = (form.call,)
    markers = ("<function", "</function>", "<param", "</param>")
