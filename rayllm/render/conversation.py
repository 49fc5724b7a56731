"""Messages of a conversation in OpenAI's format, brought into the one form that chat templates can rely on."""

import json
import re
from collections.abc import Sequence
from typing import Any

from rayllm.errors import RequestError

Json = dict[str, Any]

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of content parts, and the field that holds the text."""


def normalized(messages: Sequence[Json], wants_parts: bool, takes_text: bool, knows_developer: bool) -> list[Json]:
    """Messages for a template.

    Contents become one text, or a list of `{"type": "text", "text": ...}` where the template wants parts; a missing
    content of an assistant becomes empty; arguments of tool calls become objects where they are sound JSON, and
    stay text where not; reasoning stands under both its names; the role `developer` becomes `system` where the
    template does not know it. Function calls of older clients, and the messages that answer them, become those of
    tools. Other fields stay as they are.

    Raises:
        RequestError: a message is malformed; names the place.
    """
    if not messages:
        raise RequestError("messages must not be empty", "messages")
    return [
        _message(message, f"messages[{i}]", wants_parts, takes_text, knows_developer)
        for i, message in enumerate(_with_tools(messages))
    ]


def check_messages(messages: Sequence[Any]) -> None:
    """Check the form of messages without a template.

    Raises:
        RequestError: a message is malformed; names the place.
    """
    normalized(messages, wants_parts=True, takes_text=True, knows_developer=True)


def _with_tools(messages: Sequence[Any]) -> list[Any]:
    """Messages with tool calls in place of function calls. Ids, which function calls lack, are made from places."""
    out = []
    id_ = _id_of_call(0)
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            out.append(message)
            continue
        message = dict(message)
        function = message.pop("function_call", None)
        if function is not None:
            if message.get("tool_calls"):
                raise RequestError(f"messages[{i}] must have tool_calls or function_call, not both", f"messages[{i}]")
            id_ = _id_of_call(i)
            message["tool_calls"] = [{"id": id_, "type": "function", "function": function}]
        if message.get("role") == "function":
            content = message.get("content")
            message |= {"role": "tool", "tool_call_id": id_, "content": "" if content is None else content}
        out.append(message)
    return out


def _id_of_call(place: int) -> str:
    return f"call{place:05d}"  # nine letters and digits, which Mistral's templates insist on


def _message(message: Any, place: str, wants_parts: bool, takes_text: bool, knows_developer: bool) -> Json:
    if not isinstance(message, dict):
        raise RequestError(f"{place} must be an object with a role and a content", place)
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RequestError(f"{place}.role must be a role, such as 'user'", f"{place}.role")
    out = dict(message)
    if role == "developer" and not knows_developer:
        out["role"] = "system"
    out["content"] = _content(message.get("content"), role, f"{place}.content", wants_parts, takes_text)
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if isinstance(message.get(name), str) and message.get(other) is None:
            out[other] = message[name]
    calls = out.pop("tool_calls", None)
    if calls:
        out["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls")
    return out


def _content(content: Any, role: str, place: str, wants_parts: bool, takes_text: bool) -> str | list[Json]:
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, str):
        return content if takes_text else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a text or a list of parts", place)
    texts = [_part(part, f"{place}[{i}]") for i, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if wants_parts else "\n".join(texts)


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_FIELDS:
        shown = repr(kind)[:40] if isinstance(kind, str) else "without a type"
        raise RequestError(f"{place} is a part {shown}, but this model takes only parts of type 'text'", place)
    text = part.get(_TEXT_FIELDS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{place}.{_TEXT_FIELDS[kind]} must be a text", place)
    return text


def _tool_calls(calls: Any, place: str) -> list[Json]:
    if not isinstance(calls, list):
        raise RequestError(f"{place} must be a list", place)
    return [_tool_call(call, f"{place}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, place: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place}.function must be an object with a name", place)
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        # Agents send back what a model once wrote. Damaged arguments are shown to it as they are.
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not isinstance(arguments, dict):
        raise RequestError(f"{place}.function.arguments must be JSON text or an object", place)
    return {**call, "function": {**function, "arguments": arguments}}
