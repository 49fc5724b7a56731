"""Requests of Anthropic's messages API, turned into those of chat completions."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rayllm.api.wire import Refusal, Wire
from rayllm.errors import RequestError

Json = dict[str, Any]

_HOSTED = "this server runs no tools, files or agents of its own; leave the field out"
REFUSED: Mapping[str, Refusal] = {
    "container": Refusal(_HOSTED),
    "mcp_servers": Refusal(_HOSTED, ([],)),
    "context_management": Refusal("conversations are not edited here; leave the field out"),
    "diagnostics": Refusal("there are no such diagnostics; leave the field out"),
    "inference_geo": Refusal("this server is where it is; leave the field out"),
    "speed": Refusal("this server has one speed; leave the field out", ("standard",)),
}
NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking",
    "include_reasoning": "thinking",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
    "parallel_tool_calls": "tool_choice",
}
"""What fields of chat completions are called here."""


class CountTokensRequest(Wire):
    """`POST /v1/messages/count_tokens`."""

    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    cache_control: Json | None = None
    """Asks for nothing: prefixes are cached by content."""
    chat_template_kwargs: Json | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Json | None = None
    """For the client's own records."""
    service_tier: Literal["auto", "standard_only"] | None = None
    user_profile_id: str | None = None
    """For the client's own records."""
    workspace_id: str | None = None
    """For the client's own records."""
    cache_salt: str | None = None
    vllm_xargs: Json | None = None


def chat_fields(request: CountTokensRequest, thinks: bool) -> Json:
    """The fields of a chat completion that asks for the same.

    `thinks` says that the chat template has a variable `enable_thinking`.

    Raises:
        RequestError: names the place.
    """
    messages = _messages(request)
    fields: Json = {
        "model": request.model,
        "messages": messages,
        "tools": None if request.tools is None else [_tool(tool, i) for i, tool in enumerate(request.tools)],
        **_tool_choice(request.tool_choice or {"type": None}),
        **_output(request.output_config or {}),
        **_thinking(request, thinks),
    }
    if messages[-1]["role"] == "assistant":
        if messages[-1].get("tool_calls") or not any(part["text"] for part in messages[-1]["content"]):
            raise RequestError(
                "messages must end with the user's, or with a text of the assistant to go on", "messages"
            )
        fields["continue_final_message"] = True
    if isinstance(request, MessagesRequest):
        names = ("max_tokens", "stream", "temperature", "top_k", "top_p", "cache_salt", "vllm_xargs")
        fields |= {name: getattr(request, name) for name in names}
        fields["stop"] = request.stop_sequences or None
    return fields


def _thinking(request: CountTokensRequest, thinks: bool) -> Json:
    thinking = request.thinking or {}
    kind = thinking.get("type")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise RequestError("thinking.type must be 'enabled', 'disabled' or 'adaptive'", "thinking")
    fields: Json = {}
    kwargs = dict(request.chat_template_kwargs or {})
    if kind is not None and thinks:
        kwargs.setdefault("enable_thinking", kind != "disabled")
    if kwargs:
        fields["chat_template_kwargs"] = kwargs
    if kind == "enabled":
        fields["thinking_token_budget"] = thinking.get("budget_tokens")
    if thinking.get("display") == "omitted":
        fields["include_reasoning"] = False
    return fields


def _output(config: Json) -> Json:
    fields: Json = {"reasoning_effort": config.get("effort")}
    form = config.get("format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            raise RequestError("output_config.format must be of type 'json_schema' and have a schema", "output_config")
        schema = {"name": "output", "schema": form["schema"], "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _tool(tool: Json, i: int) -> Json:
    place = f"tools[{i}]"
    if tool.get("type") not in (None, "custom"):
        raise RequestError(f"{place} is of type {tool['type']!r}, but {_HOSTED}", place)
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise RequestError(f"{place} must have a name and an input_schema", place)
    if tool.get("defer_loading") or tool.get("input_examples"):
        raise RequestError(f"{place}: defer_loading and input_examples cannot be used; leave them out", place)
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: Json) -> Json:
    match choice.get("type"):
        case None:
            return {}
        case "tool":
            chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
        case "any":
            chosen = "required"
        case "auto" | "none" as kind:
            chosen = kind
        case _:
            raise RequestError("tool_choice.type must be 'auto', 'any', 'tool' or 'none'", "tool_choice")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chosen, **parallel}


# -- messages


def _messages(request: CountTokensRequest) -> list[Json]:
    """The conversation. Turns of one role that follow each other are one turn, as many templates want it."""
    out: list[Json] = []
    if request.system:
        out.append({"role": "system", "content": _texts(request.system, "system")})
    turns: list[tuple[str, list[tuple[str, Any]]]] = []
    for i, message in enumerate(request.messages):
        place = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{place} must be an object with the role 'user' or 'assistant'", place)
        blocks = _blocks(message.get("content"), f"{place}.content")
        if not blocks and role != "assistant":
            raise RequestError(f"{place}.content must not be empty", place)
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    if not turns:
        raise RequestError("messages must not be empty", "messages")
    for role, blocks in turns:
        out += [_assistant(blocks)] if role == "assistant" else _user(role, blocks)
    return out


def _blocks(content: Any, place: str) -> list[tuple[str, Any]]:
    """The blocks of a content, each with its place."""
    if isinstance(content, str):
        return [(place, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a text or a list of blocks", place)
    blocks = [(f"{place}[{i}]", block) for i, block in enumerate(content)]
    for at, block in blocks:
        if not isinstance(block, dict):
            raise RequestError(f"{at} must be an object with a type", at)
    return blocks


def _user(role: str, blocks: list[tuple[str, Any]]) -> list[Json]:
    """The messages of a user's turn: each tool result is one of its own."""
    out: list[Json] = []
    for place, block in blocks:
        if block.get("type") == "tool_result":
            text = _joined(block.get("content") or "", f"{place}.content")
            shown = f"Error: {text}" if block.get("is_error") else text
            out.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": shown})
            continue
        part = {"type": "text", "text": _text(block, place)}
        if not out or out[-1]["role"] != role:
            out.append({"role": role, "content": []})
        out[-1]["content"].append(part)
    return out


def _assistant(blocks: list[tuple[str, Any]]) -> Json:
    parts, thoughts, calls = [], [], []
    for place, block in blocks:
        match block.get("type"):
            case "thinking":
                if not isinstance(block.get("thinking"), str):
                    raise RequestError(f"{place}.thinking must be a text", place)
                thoughts.append(block["thinking"])
            case "tool_use":
                calls.append(_call(block, place))
            case _:
                parts.append({"type": "text", "text": _text(block, place)})
    message: Json = {"role": "assistant", "content": parts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Json, place: str) -> Json:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise RequestError(f"{place} must have a name and an input, which is an object", place)
    arguments = msgspec.json.encode(block["input"]).decode()
    return {"id": block.get("id"), "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _texts(content: Any, place: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": _text(block, at)} for at, block in _blocks(content, place)]


def _joined(content: Any, place: str) -> str:
    return "\n".join(_text(block, at) for at, block in _blocks(content, place))


def _text(block: Json, place: str) -> str:
    """The text of a block: a text, or a document that is one."""
    source = block.get("source")
    if block.get("type") == "document" and isinstance(source, dict) and source.get("type") == "text":
        heads = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
        return "\n".join([*heads, _string(source.get("data"), f"{place}.source.data")])
    if block.get("type") != "text":
        shown = repr(block.get("type"))[:40]
        raise RequestError(f"{place} is a block of type {shown}, but this server takes only text here", place)
    return _string(block.get("text"), f"{place}.text")


def _string(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{place} must be a text", place)
    return value
