"""The servers of `--tool-server`, which run tools for `/v1/responses`: MCP endpoints, or the built-in demonstration."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from rayllm.api.demo_tools import DEMO_TOOLS, run_demo_tool
from rayllm.errors import ConfigError

Json = dict[str, Any]

OPTION = "--tool-server"
DEMO = "demo"
CONNECT_S = 10.0
CALL_S = 60.0
"""The longest that one call may take."""
MOST_OUTPUT = 64 << 10
"""Characters of an output that a model gets to see."""


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool, as its server describes it."""

    name: str
    description: str | None
    schema: Json
    """Of its arguments."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a call gave, or why it failed."""

    text: str
    failed: bool = False


class Session(Protocol):
    """The calls of one response to one server, which may keep a state between them."""

    async def call(self, name: str, arguments: Json) -> ToolOutput:
        """Call a tool. Whatever goes wrong is told in the output."""
        ...

    def close(self) -> None:
        """End the session. Idempotent."""
        ...


class ToolServer(Protocol):
    """A server and its tools."""

    @property
    def name(self) -> str:
        """What it calls itself."""
        ...

    @property
    def address(self) -> str:
        """Where it is."""
        ...

    @property
    def tools(self) -> Sequence[ServerTool]:
        """All that it has."""
        ...

    def session(self) -> Session:
        """A new session, which connects when it is first used."""
        ...


def connect(addresses: Sequence[str]) -> list[ToolServer]:
    """The servers at some addresses, asked for their tools. May be called within an event loop, which it stops.

    Raises:
        ConfigError: one does not answer.
    """
    if tuple(addresses) == (DEMO,):
        return [DemoServer()]
    if not addresses:
        return []
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, _connect_all(addresses)).result()


async def _connect_all(addresses: Sequence[str]) -> list[ToolServer]:
    return list(await asyncio.gather(*map(_connect, addresses)))


async def _connect(address: str) -> ToolServer:
    for path in ("/mcp", "/sse"):
        with contextlib.suppress(Exception):  # of many libraries: what counts is that there was no answer
            async with asyncio.timeout(CONNECT_S), _client(f"http://{address}{path}") as client:
                listed = (await client.list_tools()).tools
                name = client.server_info.name or address
                tools = [ServerTool(tool.name, tool.description, tool.input_schema) for tool in listed]
                return McpServer(name, address, path, tools)
    raise ConfigError(
        OPTION, f"no MCP server answers at {address}, under /mcp or /sse", "start it first, or leave it out"
    )


@contextlib.asynccontextmanager
async def _client(url: str) -> AsyncIterator[Any]:
    from mcp import Client
    from mcp.client.sse import sse_client

    async with Client(sse_client(url) if url.endswith("/sse") else url) as client:
        yield client


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP endpoint, over HTTP."""

    name: str
    address: str
    path: str
    tools: Sequence[ServerTool]

    def session(self) -> Session:
        """A new session."""
        return McpSession(self)


class McpSession:
    """Keeps its connection in a task of its own, for it must be opened and closed by one."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._asked: asyncio.Queue[tuple[str, Json, asyncio.Future[ToolOutput]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def call(self, name: str, arguments: Json) -> ToolOutput:
        """Call a tool, for `CALL_S` seconds at most."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done():
            self._asked = asyncio.Queue()  # without calls that a lost connection has left there
            self._task = loop.create_task(self._serve())
        answer: asyncio.Future[ToolOutput] = loop.create_future()
        self._asked.put_nowait((name, arguments, answer))
        await asyncio.wait((answer, self._task), timeout=CALL_S, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if self._task.done():
            return ToolOutput(f"the tool server {self._server.name!r} cannot be reached", failed=True)
        self.close()
        return ToolOutput(f"the tool took longer than {CALL_S:g} s", failed=True)

    def close(self) -> None:
        """End the session."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _serve(self) -> None:
        with contextlib.suppress(Exception):  # of many libraries: the connection is lost, which `call` tells
            async with _client(f"http://{self._server.address}{self._server.path}") as client:
                while True:
                    name, arguments, answer = await self._asked.get()
                    result = await client.call_tool(name, arguments)
                    if not answer.done():
                        answer.set_result(_output(result))


def _output(result: Any) -> ToolOutput:
    texts = [part.text if part.type == "text" else f"[{part.type}, which is not shown]" for part in result.content]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(texts)
    if len(text) > MOST_OUTPUT:
        text = f"{text[:MOST_OUTPUT]}\n[{len(text) - MOST_OUTPUT} characters more]"
    return ToolOutput(text, bool(result.is_error))


class DemoServer:
    """The built-in tools, which need no other server."""

    name = address = DEMO
    tools: Sequence[ServerTool] = [ServerTool(*tool) for tool in DEMO_TOOLS]

    def session(self) -> Session:
        """A new session."""
        return DemoSession()


class DemoSession:
    """Runs the built-in tools in this process."""

    async def call(self, name: str, arguments: Json) -> ToolOutput:
        """Call a tool."""
        try:
            return ToolOutput(run_demo_tool(name, arguments))
        except ValueError as error:
            return ToolOutput(str(error), failed=True)

    def close(self) -> None:
        """Nothing is kept."""
