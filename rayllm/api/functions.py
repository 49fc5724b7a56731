"""OpenAI's older way to call tools: `functions` and `function_call`, which become tools, and what answers with them."""

from typing import Any

from rayllm.api.wire import ChatRequest
from rayllm.errors import RequestError

Json = dict[str, Any]

NAMES = {"tools": "functions", "tool_choice": "function_call"}
"""What the fields of tools are called here."""


def with_tools(request: ChatRequest) -> ChatRequest:
    """The request with tools in place of functions, of which an answer calls one at most.

    Raises:
        RequestError: names the field.
    """
    functions, choice = request.functions, request.function_call
    if not functions:
        if choice not in (None, "none"):
            raise RequestError(
                "function_call needs functions; newer clients use tools and tool_choice", "function_call"
            )
        return request
    if request.tools or request.tool_choice is not None:
        raise RequestError("functions and tools exclude each other; leave the functions out", "functions")
    for i, function in enumerate(functions):
        if not isinstance(function.get("name"), str):
            raise RequestError(f"functions[{i}] must have a name", f"functions[{i}]")
        if not isinstance(function.get("parameters") or {}, dict):
            raise RequestError(f"functions[{i}].parameters must be a JSON schema", f"functions[{i}]")
    tools = [{"type": "function", "function": function} for function in functions]
    wanted: str | Json
    if isinstance(choice, dict):
        if set(choice) != {"name"} or not isinstance(choice["name"], str):
            raise RequestError("function_call must be 'none', 'auto' or an object with a name", "function_call")
        wanted = {"type": "function", "function": choice}
    elif choice in (None, "auto", "none"):
        wanted = choice or "auto"
    else:
        raise RequestError("function_call must be 'none', 'auto' or an object with a name", "function_call")
    return request.model_copy(update={"tools": tools, "tool_choice": wanted, "parallel_tool_calls": False})


def with_function_call(message: Json) -> Json:
    """A message, or what is added to one, with its tool call as a function call."""
    calls = message.pop("tool_calls", None)
    return {**message, "function_call": calls[0]["function"]} if calls else message
