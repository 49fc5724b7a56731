"""Tools in a request of `/v1/responses` that this service runs itself, on its tool servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rayllm.api.responses_request import InputTokensRequest
from rayllm.api.tool_servers import ServerTool, ToolServer
from rayllm.errors import RequestError

Json = dict[str, Any]
Kind = Literal["mcp", "code_interpreter", "web_search"]
R = TypeVar("R", bound=InputTokensRequest)

_KINDS: Mapping[str, Kind] = {
    "mcp": "mcp",
    "code_interpreter": "code_interpreter",
    "web_search": "web_search",
    "web_search_preview": "web_search",
}
_NAMES: Mapping[Kind, tuple[str, ...]] = {
    "code_interpreter": ("code_interpreter", "python"),
    "web_search": ("web_search", "search", "browser"),
}
"""What servers, or their tools, are called that do the work of a type of tool."""
_MCP_FIELDS = {"type", "server_label", "server_url", "server_description", "allowed_tools", "require_approval"}


@dataclass(frozen=True, slots=True)
class Hosted:
    """A tool that a request offers its model, and where it runs."""

    kind: Kind
    label: str
    """By which the request calls its server."""
    server: ToolServer
    tool: ServerTool


def host(request: R, servers: Sequence[ToolServer]) -> tuple[R, dict[str, Hosted]]:
    """The request with functions in place of the tools that run here, and these by their names.

    Raises:
        RequestError: names the tool.
    """
    hosted: dict[str, Hosted] = {}
    tools: list[Json] = []
    for i, tool in enumerate(request.tools or ()):
        kind = _KINDS.get(str(tool.get("type")))
        if kind is None:
            tools.append(tool)
            continue
        for one in _found(tool, kind, servers, f"tools[{i}]"):
            if one.tool.name in hosted:
                message = f"tools[{i}] has another tool {one.tool.name!r}; leave one out by allowed_tools"
                raise RequestError(message, f"tools[{i}]")
            hosted[one.tool.name] = one
    if not hosted:
        return request, hosted
    if both := hosted.keys() & {tool.get("name") for tool in tools}:
        raise RequestError(f"tools hold a function and a tool of a server that are both called {min(both)!r}", "tools")
    tools += [_function(one.tool) for one in hosted.values()]
    return request.model_copy(update={"tools": tools, "tool_choice": _choice(request.tool_choice, hosted)}), hosted


def _found(tool: Json, kind: Kind, servers: Sequence[ToolServer], place: str) -> list[Hosted]:
    if not servers:
        message = f"{place} is of type {tool['type']!r}, but this server runs no tools; start it with --tool-server"
        raise RequestError(message, place)
    if kind == "mcp":
        return _mcp(tool, servers, place)
    for server in servers:
        if server.name in _NAMES[kind]:
            return [Hosted(kind, server.name, server, one) for one in server.tools]
    for server in servers:
        for one in server.tools:
            if one.name in _NAMES[kind]:
                return [Hosted(kind, server.name, server, one)]
    known = " or ".join(map(repr, _NAMES[kind]))
    raise RequestError(f"{place} is of type {tool['type']!r}, but no tool server has a tool {known}", place)


def _mcp(tool: Json, servers: Sequence[ToolServer], place: str) -> list[Hosted]:
    label, url = tool.get("server_label"), tool.get("server_url")
    if not isinstance(label, str) or not label:
        raise RequestError(f"{place} must have a server_label", place)
    for name, value in tool.items():
        if name not in _MCP_FIELDS and value is not None:
            raise RequestError(f"{place}.{name} cannot be used: it is set for the tool server, at its start", place)
    if tool.get("require_approval") not in (None, "never"):
        message = f"{place}.require_approval must be 'never': calls are not held for approval; declare a function"
        raise RequestError(message, place)
    if url is None:
        server = next((one for one in servers if label in (one.name, one.address)), None)
    else:
        address = str(url).partition("://")[2].partition("/")[0]
        server = next((one for one in servers if one.address == address), None)
    if server is None:
        known = ", ".join(f"{one.name!r} ({one.address})" for one in servers)
        wanted = label if url is None else str(url)
        message = f"{place} names {wanted[:100]!r}, which is none of the tool servers of this service: {known}"
        raise RequestError(message, place)
    allowed = tool.get("allowed_tools")
    if isinstance(allowed, dict) and set(allowed) == {"tool_names"}:
        allowed = allowed["tool_names"]
    if allowed is None:
        return [Hosted("mcp", label, server, one) for one in server.tools]
    if not isinstance(allowed, list) or not all(isinstance(name, str) for name in allowed):
        raise RequestError(f"{place}.allowed_tools must be a list of names", place)
    if unknown := set(allowed) - {one.name for one in server.tools}:
        raise RequestError(f"{place}.allowed_tools has {min(unknown)[:60]!r}, which {label!r} lacks", place)
    return [Hosted("mcp", label, server, one) for one in server.tools if one.name in allowed]


def _function(tool: ServerTool) -> Json:
    return {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.schema}


def _choice(choice: str | Json | None, hosted: Mapping[str, Hosted]) -> str | Json | None:
    """The choice, with functions in place of tools that run here."""
    kind = _KINDS.get(str(choice.get("type"))) if isinstance(choice, dict) else None
    if kind is None:
        return choice
    assert isinstance(choice, dict)
    label, name = choice.get("server_label"), choice.get("name")
    names = [
        one.tool.name
        for one in hosted.values()
        if one.kind == kind and label in (None, one.label) and name in (None, one.tool.name)
    ]
    if not names:
        raise RequestError("tool_choice names none of the tools", "tool_choice")
    if len(names) == 1:
        return {"type": "function", "name": names[0]}
    tools = [{"type": "function", "name": one} for one in names]
    return {"type": "allowed_tools", "mode": "required", "tools": tools}
