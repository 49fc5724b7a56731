"""What models write: hand-written samples of every tool parser's format, and what they mean."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rayllm.parsers.events import CallArguments, CallEnd, CallStart, Content, Reasoning

NESTED = {"a": 3, "b": {"list": [1, 2.5, True, None, {"k": "v"}], "empty": {}}}
QUOTES = {"city": 'Zürich "龜" \\ 🫠\n{"x": ]} </end', "days": 5}


def _tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    _tool("weather", city="string", days="integer"),
    _tool("add", a="integer", b="object"),
    {"type": "function", "function": {"name": "now"}},
]


@dataclass(frozen=True)
class Sample:
    text: str
    calls: Sequence[tuple[str, Any]] = ()
    content: str = ""


@dataclass
class Parsed:
    """The events of an answer, put together."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]

    @property
    def all_text(self) -> str:
        return "\n".join([self.reasoning, self.content, *self.ids, *self.names, *self.arguments])

    def __eq__(self, other: object) -> bool:
        """Whether two are alike but for the ids that were made."""
        assert isinstance(other, Parsed)
        keys = ("content", "reasoning", "names", "arguments", "ended")
        return all(getattr(self, key) == getattr(other, key) for key in keys)


def parse(parser: Any, pieces: Sequence[str]) -> Parsed:
    """The events of an answer that comes in pieces; checks their order."""
    out = Parsed()
    for events in [*map(parser.feed, pieces), parser.finish()]:
        for event in events:
            match event:
                case Content(text):
                    assert text
                    out.content += text
                case Reasoning(text):
                    assert text
                    out.reasoning += text
                case CallStart(index, id_, name):
                    assert index == len(out.names)
                    out.names.append(name)
                    out.ids.append(id_)
                    out.arguments.append("")
                case CallArguments(index, text):
                    assert index == len(out.names) - 1
                    assert index not in out.ended
                    out.arguments[index] += text
                case CallEnd(index):
                    assert index == len(out.names) - 1
                    out.ended.append(index)
    assert len(set(out.ids)) == len(out.ids)
    return out


def cuts(text: str, draw: random.Random) -> list[str]:
    """A text in random pieces, some of one character."""
    pieces, at = [], 0
    while at < len(text):
        step = draw.choice((1, 1, 2, 3, 5, 8, 13, 40))
        pieces.append(text[at : at + step])
        at += step
    return pieces


def _json_call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


_TWO = [("weather", QUOTES), ("now", {})]
_ESCAPED = '{"name": "weather", "arguments": {"city": "Z\\u00fcrich \\/ \\ud83e\\udee0", "days": -1.5e3 }}'
_ESCAPED_MEANS = {"city": "Zürich / 🫠", "days": -1500.0}


def _marked(opening: str, closing: str, between: str = "", key: str = "arguments") -> list[Sample]:
    """Samples of a format that has marks around each call's object."""
    one = f"{opening}{_json_call('add', NESTED, key)}{closing}"
    two = between.join(f"{opening}{_json_call(*call, key)}{closing}" for call in _TWO)
    return [
        Sample(one, [("add", NESTED)]),
        Sample(two, _TWO),
        Sample(f"Let me see. Ça va?\n\n{two}\n", _TWO, "Let me see. Ça va?"),
        Sample(f"{opening}\n {_ESCAPED}\n{closing} and then", [("weather", _ESCAPED_MEANS)], "and then"),
        Sample(f"a {opening}no call{closing} b", (), f"a {opening}no call{closing} b"),
        Sample(f"First {one} second", [("add", NESTED)], "First  second"),
    ]


def _listed(opening: str, closing: str) -> list[Sample]:
    """Samples of a format that has marks around a list."""
    two = ", ".join(_json_call(*call) for call in _TWO)
    return [
        Sample(f"{opening}[{_json_call('add', NESTED)}]{closing}", [("add", NESTED)]),
        Sample(f"{opening}[{two}]{closing}", _TWO),
        Sample(f"Let me see.\n{opening}[\n  {two}\n]{closing}\n", _TWO, "Let me see."),
        Sample(f"a {opening}[1, 2]{closing} b", (), f"a {opening}[1, 2]{closing} b"),
    ]


_PYTHON_TWO = 'weather(city=\'Z\\xfcrich "龜" \\\\ 🫠\\n{"x": ]} </end\', days=5), now()'
_DSML = "｜DSML｜"
_PLAIN = "Nothing to call here: [1, 2] {3} <b>bold</b> 5 < 6, `x[0]`, f(a=1) 🫠\n"


def _elements(call: str, end: str, parameter: str, parameter_end: str, opening: str, closing: str) -> list[Sample]:
    """Samples of a format with elements; `%s` stands for names."""
    city = f"{parameter % 'city'}\n{QUOTES['city']}\n{parameter_end}"
    weather = f"{call % 'weather'}\n{city}\n{parameter % 'days'}\n5\n{parameter_end}\n{end}"
    nested = json.dumps(NESTED["b"])
    add = f"{call % 'add'}{parameter % 'a'}3{parameter_end}{parameter % 'b'}{nested}{parameter_end}{end}"
    now = f"{call % 'now'}\n{end}"
    return [
        Sample(f"{opening}{add}{closing}", [("add", NESTED)]),
        Sample(f"{opening}\n{weather}\n{closing}\n{opening}\n{now}\n{closing}", _TWO),
        Sample(f"Let me see.\n\n{opening}\n{weather}\n{closing}", _TWO[:1], "Let me see."),
        Sample(f"a {opening} no call {closing} b", (), f"a {opening} no call {closing} b"),
    ]


def _dsml(section: str, mark: str = _DSML) -> list[Sample]:
    def parameter(name: str, string: bool, value: str) -> str:
        return f'<{mark}parameter name="{name}" string="{str(string).lower()}">{value}</{mark}parameter>'

    def call(name: str, *parameters: str) -> str:
        return "\n".join([f'<{mark}invoke name="{name}">', *parameters, f"</{mark}invoke>"])

    weather = call("weather", parameter("city", True, QUOTES["city"]), parameter("days", False, "5"))
    add = call("add", parameter("a", False, "3"), parameter("b", False, json.dumps(NESTED["b"])))
    opening, closing = f"<{mark}{section}>", f"</{mark}{section}>"
    return [
        Sample(f"{opening}\n{add}\n{closing}", [("add", NESTED)]),
        Sample(f"Let me see.\n\n{opening}\n{weather}\n{call('now')}\n{closing}", _TWO, "Let me see."),
        Sample(f"{opening}{call('now')}{closing}", [("now", {})]),
        Sample(f"a {opening} no call {closing} b", (), f"a {opening} no call {closing} b"),
    ]


def _sections(begin: str, end: str, call: str) -> list[Sample]:
    """Samples of a format with sections; in `call`, NAME and JSON stand for a call's."""

    def written(name: str, arguments: Any, index: int = 0) -> str:
        text = json.dumps(arguments, ensure_ascii=False)
        return call.replace("NAME", name).replace("JSON", text).replace("INDEX", str(index))

    two = "\n".join(written(*each, i) for i, each in enumerate(_TWO))
    return [
        Sample(f"{begin}{written('add', NESTED)}{end}", [("add", NESTED)]),
        Sample(f"Let me see.\n{begin}\n{two}\n{end}", _TWO, "Let me see."),
        Sample(written("now", {}), [("now", {})]),
        Sample(f"a {begin} no call {end} b", (), f"a {begin} no call {end} b"),
    ]


_FENCE = "```"
_GLM_ADD = (
    "add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>\n"
    f"<arg_value>{json.dumps(NESTED['b'])}</arg_value>\n"
)
_GLM_WEATHER = (
    f"weather<arg_key>city</arg_key><arg_value>{QUOTES['city']}</arg_value>"
    "<arg_key>days</arg_key><arg_value>5</arg_value>"
)
_HY = (
    "weather<tool_sep%(s)s>\n<arg_key%(s)s>city</arg_key%(s)s>\n<arg_value%(s)s>"
    + QUOTES["city"]
    + "</arg_value%(s)s>\n<arg_key%(s)s>days</arg_key%(s)s>\n<arg_value%(s)s>5</arg_value%(s)s>\n"
)
_M3 = "]<]minimax[>["
_K3_ADD = (
    '<|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>3<|close|>argument<|sep|>'
    f'<|open|>argument key="b" type="object"<|sep|>{json.dumps(NESTED["b"])}<|close|>argument<|sep|>'
    "<|close|>call<|sep|>"
)
_K3_WEATHER = (
    '<|open|>call tool="weather" index="1"<|sep|>\n<|open|>argument key="city" type="string"<|sep|>'
    f'{QUOTES["city"]}<|close|>argument<|sep|>\n<|open|>argument key="days" type="integer"<|sep|>5'
    "<|close|>argument<|sep|>\n<|close|>call<|sep|>"
)
_K3_NOW = '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
_K3 = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")


def _m3(name: str, *elements: str) -> str:
    return f'{_M3}<invoke name="{name}">\n' + "".join(elements) + f"{_M3}</invoke>\n"


def _m3_element(name: str, *inner: str) -> str:
    return f"{_M3}<{name}>{''.join(inner)}{_M3}</{name}>\n"


def _hy(suffix: str) -> list[Sample]:
    opening, closing = f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"
    weather = f"<tool_call{suffix}>{_HY % {'s': suffix}}</tool_call{suffix}>"
    now = f"<tool_call{suffix}>now<tool_sep{suffix}>\n</tool_call{suffix}>"
    return [
        Sample(f"So:\n{opening}\n{weather}\n{now}\n{closing}", _TWO, "So:"),
        Sample(weather, _TWO[:1]),
        Sample(f"a {opening} is a mark", (), f"a {opening} is a mark"),
    ]


_QWEN = ("<function=%s>", "</function>", "<parameter=%s>", "</parameter>")
_CALL = "<|start|>assistant<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s<|call|>"

SAMPLES: dict[str, list[Sample]] = {
    "hermes": [
        *_marked("<tool_call>", "</tool_call>", "\n"),
        Sample('<tool_call>{"arguments": {"a": 3}, "name": "add"}</tool_call>', [("add", {"a": 3})]),
        Sample('<tool_call>{"name": "add", "arguments": "{\\"a\\": 3}"}</tool_call>', [("add", {"a": 3})]),
        Sample('<tool_call>{"name": "add", "arguments": "3"}</tool_call>', [("add", "3")]),
        Sample('<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", {})]),
        Sample('<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
        Sample('<tool_call>{"name": "now"}', [("now", {})]),
        Sample('<tool_call>{"name": "n\\ud83d", "arguments": {}}</tool_call>', [("n\ufffd", {})]),
        Sample('<tool_call>{"name": "now", "arguments": {}}\n<tool_call>{"name": "now", "arguments": {}}',
               [("now", {}), ("now", {})]),
        Sample('<tool_call>{"name": 5, "arguments": {}}</tool_call>', (),
               '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ],
    "longcat": _marked("<longcat_tool_call>", "</longcat_tool_call>"),
    "internlm": _marked("<|action_start|><|plugin|>\n", "<|action_end|>", key="parameters"),
    "granite": [*_listed("<|tool_call|>", ""), *_listed("<tool_call>", "</tool_call>")],
    "granite-20b-fc": _marked("<function_call> ", ""),
    "jamba": _listed("<tool_calls>", "</tool_calls>"),
    "minimax": [
        Sample(f"<tool_calls>\n{_json_call('add', NESTED)}\n</tool_calls>", [("add", NESTED)]),
        Sample("So:\n<tool_calls>\n" + "\n".join(_json_call(*c) for c in _TWO) + "\n</tool_calls>", _TWO, "So:"),
        Sample("<tool_calls>\n</tool_calls>", (), "<tool_calls>\n</tool_calls>"),
    ],
    "phi4_mini_json": _listed("functools", ""),
    "llama3_json": [
        Sample(_json_call("add", NESTED, "parameters"), [("add", NESTED)]),
        Sample("<|python_tag|>" + "; ".join(_json_call(*c, "parameters") for c in _TWO), _TWO),
        Sample('So: {"type": "function", "name": "now", "parameters": {}}', [("now", {})], "So:"),
        Sample('{"a": {"name": "x"}} and {"name": "unknown", "parameters": {}}', (),
               '{"a": {"name": "x"}} and {"name": "unknown", "parameters": {}}'),
    ],
    "xlam": [
        *_listed("", ""),
        *_listed("[TOOL_CALLS]", ""),
        *_listed("<tool_call>", "</tool_call>"),
        Sample(f"{_FENCE}json\n[{_json_call('add', NESTED)}]\n{_FENCE}", [("add", NESTED)]),
        Sample(f"See {_FENCE}python\nx = [1]\n{_FENCE}", (), f"See {_FENCE}python\nx = [1]\n{_FENCE}"),
    ],
    "mistral": [
        *_listed("[TOOL_CALLS] ", ""),
        Sample(f"[TOOL_CALLS]add{json.dumps(NESTED)}", [("add", NESTED)]),
        Sample("Well. [TOOL_CALLS]weather[ARGS]" + json.dumps(QUOTES) + "[TOOL_CALLS]now[CALL_ID]abcdefgh1[ARGS]{}",
               _TWO, "Well."),
        Sample("[TOOL_CALLS] is a mark", (), "[TOOL_CALLS] is a mark"),
    ],
    "deepseek_v3": _sections(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n{_FENCE}json\nJSON\n{_FENCE}<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": _sections(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
    ),
    "kimi_k2": _sections(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>JSON<|tool_call_end|>",
    ),
    "pythonic": [
        Sample("[add(a=3, b={'list': [1, 2.5, True, None, {'k': \"v\"}], 'empty': {}})]", [("add", NESTED)]),
        Sample(f"[{_PYTHON_TWO}]", _TWO),
        Sample(f"So:\n[{_PYTHON_TWO}]\n", _TWO, "So:"),
        Sample("[add(a=(1, 2,), b=[0x10, -1_000, .5, 'it\\'s', '\\d', '\\U0001FAE0'],)]",
               [("add", {"a": [1, 2], "b": [16, -1000, 0.5, "it's", "\\d", "🫠"]})]),
        Sample("[see(a=1)] as in [1]", (), "[see(a=1)] as in [1]"),
    ],
    "llama4_pythonic": [
        Sample(f"<|python_start|>[{_PYTHON_TWO}]<|python_end|>", _TWO),
        Sample(f"[{_PYTHON_TWO}]", _TWO),
        Sample("So <|python_start|>x = 1<|python_end|>", (), "So <|python_start|>x = 1<|python_end|>"),
    ],
    "lfm2": [
        Sample(f"<|tool_call_start|>[{_PYTHON_TWO}]<|tool_call_end|>So.", _TWO, "So."),
        Sample(f"[{_PYTHON_TWO}]", (), f"[{_PYTHON_TWO}]"),
    ],
    "olmo3": [
        Sample("<function_calls>\nadd(a=3, b={\"list\": [1, 2.5, true, null, {\"k\": \"v\"}], \"empty\": {}})\n"
               "</function_calls>", [("add", NESTED)]),
        Sample("So:\n<function_calls>" + _PYTHON_TWO.replace(", now", "\nnow") + "</function_calls>", _TWO, "So:"),
        Sample("<function_calls>\nno\n</function_calls>", (), "<function_calls>\nno\n</function_calls>"),
    ],
    "functiongemma": [
        Sample("<start_function_call>call:add{a:3,b:{list:[1,2.5,true,null,{k:<escape>v<escape>}],empty:{}}}"
               "<end_function_call>", [("add", NESTED)]),
        Sample(f"So <start_function_call>call:weather{{city:<escape>{QUOTES['city']}<escape>,days:5}}"
               "<end_function_call><start_function_call>call:now{}<end_function_call>", _TWO, "So"),
        Sample("<start_function_call>now<end_function_call>", (), "<start_function_call>now<end_function_call>"),
    ],
    "gemma4": [
        Sample('<|tool_call>call:add{a:3,b:{list:[1,2.5,true,null,{k:<|"|>v<|"|>}],empty:{}}}<tool_call|>',
               [("add", NESTED)]),
        Sample(f'So <|tool_call>call:weather{{city:<|"|>{QUOTES["city"]}<|"|>,days:5}}<tool_call|>'
               "<|tool_call>call:now{}<tool_call|>", _TWO, "So"),
    ],
    "gigachat3": [
        Sample(f'<|function_call|>{{"name": "add", "arguments": {json.dumps(NESTED)}}}', [("add", NESTED)]),
        Sample(f'So\n\nfunction call<|role_sep|>\n{{"name": "weather", "arguments": {json.dumps(QUOTES)}}}',
               _TWO[:1], "So"),
        Sample("A function call<|role_sep|> none", (), "A function call<|role_sep|> none"),
    ],
    "cohere_command3": [
        Sample(f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "add", "parameters": {json.dumps(NESTED)}}}'
               "\n]<|END_ACTION|>", [("add", NESTED)]),
        Sample(f'So<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "weather", "parameters": {json.dumps(QUOTES)}}}'
               ', {"tool_call_id": "1", "tool_name": "now"}]<|END_ACTION|>', _TWO, "So"),
        Sample('<|START_ACTION|>\n{"tool_name": "now", "parameters": {}}\n<|END_ACTION|>', [("now", {})]),
        Sample("<|START_ACTION|> is a mark", (), "<|START_ACTION|> is a mark"),
    ],
    "apertus": [
        Sample(f'<|tools_prefix|>[{{"add": {json.dumps(NESTED)}}}]<|tools_suffix|>', [("add", NESTED)]),
        Sample(f'So <|tools_prefix|>[{{"weather": {json.dumps(QUOTES)}}}, {{"now": {{}}}}]<|tools_suffix|>', _TWO,
               "So"),
        Sample('<|tools_prefix|>[{"now": 5}]', (), '<|tools_prefix|>[{"now": 5}]'),
    ],
    "qwen3_coder": [
        *_elements(*_QWEN, "<tool_call>", "</tool_call>"),
        *_elements(*_QWEN, "", "")[:3],
    ],
    "seed_oss": _elements(*_QWEN, "<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": _elements('<invoke name="%s">', "</invoke>", '<parameter name="%s">', "</parameter>",
                            "<minimax:tool_call>", "</minimax:tool_call>"),
    "step3": _elements('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="%s">',
                       "</steptml:invoke><｜tool_call_end｜>", '<steptml:parameter name="%s">', "</steptml:parameter>",
                       "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "glm45": [
        Sample(f"<tool_call>{_GLM_ADD}</tool_call>", [("add", NESTED)]),
        Sample(f"So:\n<tool_call>{_GLM_WEATHER}</tool_call>\n<tool_call>now\n</tool_call>", _TWO, "So:"),
        Sample("<tool_call> is a mark", (), "<tool_call> is a mark"),
    ],
    "gigachat35": _dsml("tool_calls", "｜GCML｜"),
    "hy_v3": [*_hy(""), *_hy(":opensource")],
    "solar_open2": [
        Sample("<|tool_call:start|>add\n<|tool_arg:start|>a<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_arg:start|>b"
               f"<|tool_arg:value|>{json.dumps(NESTED['b'])}<|tool_arg:end|>\n<|tool_call:end|>", [("add", NESTED)]),
        Sample(f"So:<|tool_call:start|>weather\n<|tool_arg:start|>city<|tool_arg:value|>{QUOTES['city']}<|tool_arg:end|>"
               "<|tool_arg:start|>days<|tool_arg:value|>5<|tool_arg:end|><|tool_call:end|>\n"
               "<|tool_call:start|>now\n<|tool_call:end|>", _TWO, "So:"),
        Sample("<|tool_call:start|> is a mark", (), "<|tool_call:start|> is a mark"),
    ],
    "minicpm5": [
        *_elements('<function name="%s">', "</function>", '<param name="%s">', "</param>", "", "")[:3],
        Sample('<function name="weather"><param name="city"><![CDATA[a <b/> &amp;\n]]></param></function>',
               [("weather", {"city": "a <b/> &amp;\n"})]),
        Sample('a <function name="x> b', (), 'a <function name="x> b'),
    ],
    "minimax_m3": [
        Sample(f"{_M3}<tool_call>\n" + _m3("add", _m3_element("a", "3"), _m3_element(
            "b", _m3_element("list", *(_m3_element("item", v) for v in ("1", "2.5", "true", "null")),
                             _m3_element("item", _m3_element("k", "v"))), _m3_element("empty", "{}"))) +
               f"{_M3}</tool_call>", [("add", NESTED)]),
        Sample(f"So:\n{_M3}<tool_call>" + _m3("weather", _m3_element("city", QUOTES["city"]), _m3_element("days", "5"))
               + _m3("now") + f"{_M3}</tool_call>\n", _TWO, "So:"),
        Sample(f"{_M3}<tool_call>" + _m3("add", _m3_element("b")) + f"{_M3}</tool_call>", [("add", {"b": {}})]),
        Sample(f"a {_M3}<tool_call> b", (), f"a {_M3}<tool_call> b"),
    ],
    "kimi_k3": [
        Sample(f"{_K3[0]}{_K3_ADD}{_K3[1]}<|close|>message<|sep|>", [("add", NESTED)]),
        Sample(f"<|open|>response<|sep|>So:<|close|>response<|sep|>{_K3[0]}\n{_K3_WEATHER}\n{_K3_NOW}\n{_K3[1]}", _TWO,
               "So:"),
        Sample(f'{_K3[0]}<|open|>call tool="add" index="1"<|sep|><|open|>json type="object"<|sep|>{json.dumps(NESTED)}'
               f"<|close|>json<|sep|><|close|>call<|sep|>{_K3[1]}", [("add", NESTED)]),
        Sample(f'{_K3[0]}<|open|>call tool="a&amp;b"<|sep|><|open|>argument key="&quot;"<|sep|>1<|close|>argument'
               f"<|sep|><|close|>call<|sep|>{_K3[1]}", [("a&b", {'"': "1"})]),
        Sample(f"a {_K3[0]} is <|open|> a mark", (), f"a {_K3[0]} is <|open|> a mark"),
    ],
    "inkling": [
        Sample(f'add<|content_invoke_tool_json|>{{"name":"add","args":{json.dumps(NESTED)}}}<|end_message|>',
               [("add", NESTED)]),
        Sample("<|content_text|>So:<|end_message|><|message_model|>weather<|content_invoke_tool_json|>"
               '{"name": "weather", "args": {"city": "Zürich \\"龜\\" {\\"x\\": ]} </", "days": 5}}<|end_message|>'
               '<|message_model|>now<|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|>'
               "<|content_model_end_sampling|>",
               [("weather", {"city": 'Zürich "龜" {"x": ]} </', "days": 5}), ("now", {})], "So:"),
        Sample('<|message_model|><|content_invoke_tool_json|>{"name": "now"}', [("now", {})]),
        Sample("<|content_text|>Good <|message_model|> day", (), "Good <|message_model|> day"),
    ],
    "openai": [
        Sample(_CALL.removeprefix("<|start|>assistant") % ("add", json.dumps(NESTED)), [("add", NESTED)]),
        Sample(_CALL % ("weather", json.dumps(QUOTES)) + _CALL % ("now", ""), _TWO),
        Sample(" to=functions.now<|channel|>commentary json<|message|>{}", [("now", {})]),
        Sample("<|channel|>final<|message|>Good day.<|return|>", (), "Good day."),
        Sample("<|channel|>commentary<|message|>First this.<|end|>" + _CALL % ("now", "{}"), [("now", {})],
               "First this."),
        Sample("<|channel|> is <|start|> a mark", (), "<|channel|> is <|start|> a mark"),
    ],
}  # fmt: skip
for _samples in SAMPLES.values():
    _samples.append(Sample(_PLAIN, (), _PLAIN))
