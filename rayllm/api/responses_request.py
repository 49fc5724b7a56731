"""Requests of OpenAI's responses API, turned into those of chat completions."""

import base64
import binascii
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rayllm.api.parse import parse_fields, parse_json
from rayllm.api.wire import ChatRequest, Refusal, Wire
from rayllm.errors import RequestError
from rayllm.render.conversation import check_messages

Json = dict[str, Any]

_HOSTED = "this server runs no tools, files or agents of its own"
REFUSED: Mapping[str, Refusal] = {
    "conversation": Refusal("conversations are not kept here; use previous_response_id", ()),
    "prompt": Refusal("prompt templates are not kept here; send the text as input"),
    "context_management": Refusal("conversations are not compacted here; leave the field out"),
    "moderation": Refusal(f"{_HOSTED}; leave the field out"),
    "image": Refusal("this server takes and gives text only"),
    "access_programs": Refusal("this server knows no programs; leave the field out"),
    "background_options": Refusal("background responses begin at once; leave the field out"),
    "prompt_cache_options": Refusal("prefixes are cached by content; leave the field out"),
    "prompt_cache_retention": Refusal("cached prefixes are kept as long as there is room", ("in-memory", "in_memory")),
    "enable_response_messages": Refusal("messages behind a response are not shown; leave the field out", (False,)),
    "previous_input_messages": Refusal("send earlier messages in input, or use previous_response_id"),
}
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
    "reasoning_effort": "reasoning",
}
"""What fields of chat completions are called here."""
PASSED = (
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "parallel_tool_calls",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "request_id",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "temperature",
    "top_k",
    "top_p",
    "vllm_xargs",
)
"""Fields that are the same in chat completions."""
LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
_SEALED = "plain:"
"""Begins a reasoning item's `encrypted_content`, which clients give back unread. Nothing in it is secret from them."""


class ResponseStreamOptions(BaseModel):
    """How a stream is written."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    include_obfuscation: Literal[False] | None = None


class InputTokensRequest(Wire):
    """`POST /v1/responses/input_tokens`."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    reasoning: Json | None = None
    text: Json | None = None
    tool_choice: str | Json | None = None
    tools: list[Json] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` leaves out the oldest turns, where all do not fit the context."""
    parallel_tool_calls: bool | None = None


class ResponsesRequest(InputTokensRequest):
    """`POST /v1/responses`, but for the fields of `PASSED`."""

    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    """Limits calls of tools that the server runs."""
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: int | None = None
    user: str | None = None
    """For the client's own records."""


def parse(body: bytes) -> tuple[ResponsesRequest, Json]:
    """The request in a body, and its fields that chat completions take as they are.

    Raises:
        RequestError: names the field.
    """
    fields = parse_json(body)
    passed = {name: fields[name] for name in PASSED if name in fields}
    own = ResponsesRequest.model_fields
    return parse_fields(
        ResponsesRequest, {name: value for name, value in fields.items() if name in own or name not in passed}, REFUSED
    ), passed


def items_of(value: str | list[Any] | None) -> list[Json]:
    """The input as items, each with an id.

    Raises:
        RequestError: names the item.
    """
    if value is None or value == "" or value == []:
        raise RequestError("input must be a text or a list of items, and not empty", "input")
    if isinstance(value, str):
        value = [{"role": "user", "content": [{"type": "input_text", "text": value}]}]
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise RequestError(f"input[{i}] must be an object", f"input[{i}]")
    return [{"type": "message", "id": f"item_{uuid.uuid4().hex}", **_without_nones(item)} for item in value]


def chat_request(request: InputTokensRequest, items: Sequence[Json], known: int, passed: Json) -> ChatRequest:
    """The chat completion that asks for the same.

    `items` are those of earlier turns, `known` in number, and of the input; `passed` comes from `parse`.

    Raises:
        RequestError: names the field.
    """
    tools, choice = _tools(request)
    fields: Json = {
        **passed,
        "model": request.model,
        "messages": messages_of(request.instructions, items, known),
        "tools": tools,
        "tool_choice": choice,
        **_text(request.text or {}),
        **_reasoning(request.reasoning or {}),
    }
    if isinstance(request, ResponsesRequest):
        fields["max_completion_tokens"] = request.max_output_tokens
        fields["stream"] = request.stream
        fields |= _logprobs(request)
    return parse_fields(ChatRequest, fields)


def seal(text: str) -> str:
    """A reasoning's text as `encrypted_content`."""
    return _SEALED + base64.b64encode(text.encode()).decode()


def _unseal(content: str, place: str) -> str:
    try:
        return base64.b64decode(content.removeprefix(_SEALED).encode(), validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise RequestError(f"{place}.encrypted_content was not made by this server; leave it out", place) from None


def _logprobs(request: ResponsesRequest) -> Json:
    for name in request.include or ():
        if name not in _INCLUDABLE:
            raise RequestError(f"include cannot hold {name[:60]!r}: {_HOSTED}; it takes {_INCLUDABLE}", "include")
    if LOGPROBS in (request.include or ()) or request.top_logprobs:
        return {"logprobs": True, "top_logprobs": request.top_logprobs}
    return {}


def _text(text: Json) -> Json:
    fields: Json = {}
    form = text.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type"}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif kind == "json_object":
        fields["response_format"] = {"type": "json_object"}
    elif kind != "text":
        raise RequestError("text.format must be of type 'text', 'json_object' or 'json_schema'", "text")
    fields["verbosity"] = text.get("verbosity")
    return fields


def _reasoning(reasoning: Json) -> Json:
    for name, neutral in (("summary", "auto"), ("generate_summary", "auto"), ("context", "auto"), ("mode", "standard")):
        if reasoning.get(name) not in (None, neutral):
            raise RequestError(f"reasoning.{name} must be {neutral!r}: reasoning is shown as it is", "reasoning")
    return {"reasoning_effort": reasoning.get("effort")}


def _tools(request: InputTokensRequest) -> tuple[list[Json] | None, str | Json | None]:
    """The tools and the choice among them."""
    tools = None if request.tools is None else [_tool(tool, i) for i, tool in enumerate(request.tools)]
    choice = request.tool_choice
    if not isinstance(choice, dict):
        return tools, choice if tools or choice not in ("auto", "none") else None
    if choice.get("type") == "function":
        return tools, {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") != "allowed_tools":
        kind = repr(choice.get("type"))[:40]
        raise RequestError(f"tool_choice is of type {kind}, but {_HOSTED}; it may name a function", "tool_choice")
    allowed = choice.get("tools")
    if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
        raise RequestError("tool_choice.tools must be a list of tools", "tool_choice")
    names = {str(tool.get("name")) for tool in allowed}
    if unknown := names - {tool["function"]["name"] for tool in tools or ()}:
        raise RequestError(f"tool_choice allows {min(unknown)[:60]!r}, which is no tool", "tool_choice")
    return [tool for tool in tools or () if tool["function"]["name"] in names], choice.get("mode")


def _tool(tool: Json, i: int) -> Json:
    place = f"tools[{i}]"
    if tool.get("type") != "function":
        kind = repr(tool.get("type"))[:40]
        raise RequestError(f"{place} is of type {kind}, but {_HOSTED}; it takes type 'function'", place)
    if not isinstance(tool.get("name"), str):
        raise RequestError(f"{place} must have a name", place)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


# -- items


def messages_of(instructions: str | None, items: Sequence[Json], known: int = 0) -> list[Json]:
    """The conversation of some items; the first `known` come from earlier turns, the others are the input.

    Raises:
        RequestError: names the item.
    """
    out: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    for i, item in enumerate(items):
        _add(out, item, f"input[{i - known}]")
    return out


def _add(out: list[Json], item: Json, place: str) -> None:
    """Add one item. Reasoning, text and calls of one turn of the assistant are one message."""
    match item.get("type"):
        case "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            _check(message, place)
            if message["role"] == "assistant" and _goes_on(out):
                out[-1]["content"] = message["content"]
            else:
                out.append(message)
        case "reasoning":
            if not _goes_on(out) or "reasoning_content" in out[-1]:
                out.append({"role": "assistant", "content": ""})
            out[-1]["reasoning_content"] = _thought(item, place)
        case "function_call":
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _check({"role": "assistant", "content": "", "tool_calls": [call]}, place)
            out[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            _check(message, place)
            out.append(message)
        case "mcp_call" | "code_interpreter_call" | "web_search_call":
            for one in _as_function(item):
                _add(out, one, place)
        case "mcp_list_tools":
            pass
        case kind:
            known = "'message', 'reasoning', 'function_call' or 'function_call_output'"
            raise RequestError(f"{place} is of type {repr(kind)[:40]}, but this server takes {known}", place)


def _as_function(item: Json) -> tuple[Json, Json]:
    """A call that a service has made, as one of a function and its output."""
    id_ = item.get("id")
    name, arguments, output = item.get("name"), item.get("arguments"), item.get("output") or item.get("error")
    match item["type"]:
        case "code_interpreter_call":
            name, arguments = name or "code_interpreter", json.dumps({"code": item.get("code")})
            logs = item.get("outputs")
            logs = [one for one in logs if isinstance(one, dict)] if isinstance(logs, list) else []
            output = "\n".join(str(one.get("logs", "")) for one in logs)
        case "web_search_call":
            action = item.get("action")
            query = action.get("query") if isinstance(action, dict) else None
            name, arguments = name or "web_search", json.dumps({"query": query})
    return (
        {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments},
        {"type": "function_call_output", "call_id": id_, "output": output or ""},
    )


def turns(items: Sequence[Json]) -> list[int]:
    """The places at which turns begin, but for the first: messages of users."""
    users = [i for i, item in enumerate(items) if item.get("type") == "message" and item.get("role") == "user"]
    return users[1:]


def from_turn(items: Sequence[Json], start: int) -> list[Json]:
    """The items from one turn on, behind what the system says."""
    return [*(item for item in items[:start] if item.get("role") in ("system", "developer")), *items[start:]]


def _goes_on(out: list[Json]) -> bool:
    """Whether the last message is an assistant's that has no text yet."""
    return bool(out) and out[-1]["role"] == "assistant" and not out[-1]["content"] and "tool_calls" not in out[-1]


def _thought(item: Json, place: str) -> str:
    parts = item.get("content") or ()
    if not parts and isinstance(item.get("encrypted_content"), str):
        return _unseal(item["encrypted_content"], place)
    parts = parts or item.get("summary") or []
    if not isinstance(parts, list):
        raise RequestError(f"{place} must have a list as content or summary", place)
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{place} must hold parts with a text", place)
    return "\n".join(map(str, texts))


def _check(message: Json, place: str) -> None:
    try:
        check_messages([message])
    except RequestError as error:
        where = (error.param or "").replace("messages[0]", place)
        raise RequestError(error.message.replace("messages[0]", place), where or place) from None


def _without_nones(item: Json) -> Json:
    """An item without the fields that a client filled in with nothing."""
    return {name: value for name, value in item.items() if value is not None}
