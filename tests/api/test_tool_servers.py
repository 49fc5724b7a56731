"""Tools of MCP servers in `/v1/responses`: a small server on loopback, a scripted model, OpenAI's own client."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator

import openai
import pytest
import uvicorn
from mcp.server import MCPServer

from rayllm.api import tool_servers
from rayllm.api.demo_tools import run_demo_tool
from rayllm.api.fake import Script
from rayllm.api.tool_servers import connect
from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.errors import ConfigError

from .conftest import MODEL, Harness
from .test_responses import client_of, finished, prompt_of

pytestmark = pytest.mark.slow

SAY = "<tool_call>%s</tool_call>"


def stub() -> MCPServer:
    server = MCPServer(name="stub", log_level="ERROR")
    notes: list[str] = []

    @server.tool()
    def note(text: str) -> str:
        """Keep a text, and tell all that are kept."""
        notes.append(text)
        return " ".join(notes)

    @server.tool()
    def broken() -> str:
        """Fail."""
        raise ValueError("secret")

    @server.tool()
    def slow() -> str:
        """Take long."""
        time.sleep(2)
        return "late"

    @server.tool()
    def python(code: str) -> str:
        """Run a program, or so it seems."""
        return f"ran {code}"

    @server.tool()
    def web_search(query: str) -> str:
        """Find a page, or so it seems."""
        return f"found {query}"

    return server


@pytest.fixture(scope="module", params=["/mcp", "/sse"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    server = stub()
    app = server.streamable_http_app() if request.param == "/mcp" else server.sse_app()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        ran = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=ran.run, kwargs={"sockets": [listener]})
        thread.start()
        while not ran.started:
            time.sleep(0.01)
        yield "{}:{}".format(*listener.getsockname())
        ran.should_exit = True
        thread.join()


@pytest.fixture
def api(address: str) -> Harness:
    return make(address)


def make(*addresses: str, **more) -> Harness:
    known = {"max_model_len": 8192, "tool_parser": "hermes", "auto_tools": True}
    return Harness(tool_servers=addresses, **{**known, **more})


def turns(api: Harness, *texts: str) -> None:
    """Let the model say one text after the other."""
    api.scripts(*(Script([[i] for i in api.ids(text)], "stop") for text in texts))


def says(name: str, **arguments) -> str:
    return SAY % json.dumps({"name": name, "arguments": arguments})


def mcp(label: str = "stub", **more):
    return {"type": "mcp", "server_label": label, "require_approval": "never", **more}


async def create(api: Harness, **more):
    async with client_of(api) as client:
        made = await client.responses.create(model=MODEL, **{"input": "hi", "tools": [mcp()], **more})
        return [event async for event in made] if more.get("stream") else made


def sum_of(events) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


async def test_a_call_and_the_answer(api):
    turns(api, says("note", text="one"), says("note", text="two"), "Noted.")
    response = await create(api)
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    listed, first, second, _ = response.output
    assert {tool.name for tool in listed.tools} == {"note", "broken", "slow", "python", "web_search"}
    assert (first.name, first.server_label, json.loads(first.arguments)) == ("note", "stub", {"text": "one"})
    assert (first.output, first.error, first.status) == ("one", None, "completed")
    assert second.output.endswith("one two")
    assert (response.output_text, response.status) == ("Noted.", "completed")
    assert "one two" in prompt_of(api)
    assert response.usage.output_tokens == sum(len(add) for add in map(_said, api.service.streams))
    assert response.tools[0].type == "mcp"


def _said(stream) -> list[int]:
    return [i for step in stream.script.steps for i in step]


async def test_streamed(api):
    turns(api, says("python", code="1+1"), says("web_search", query="cats"), "Ready")
    tools = [{"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "web_search"}]
    events = await create(api, stream=True, tools=[*tools, mcp(allowed_tools=["note"])])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = sum_of(events)
    for some in (
        ["output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"],
        ["output_item.added", "code_interpreter_call.in_progress", "code_interpreter_call_code.delta",
         "code_interpreter_call_code.done", "code_interpreter_call.interpreting", "code_interpreter_call.completed",
         "output_item.done"],
        ["output_item.added", "web_search_call.in_progress", "web_search_call.searching", "web_search_call.completed",
         "output_item.done"],
    ):  # fmt: skip
        at = kinds.index(some[1]) - 1
        assert kinds[at : at + len(some)] == some
    output = events[-1].response.output
    assert [item.type for item in output] == [
        "mcp_list_tools", "code_interpreter_call", "web_search_call", "message"
    ]  # fmt: skip
    assert (output[1].code, output[1].outputs[0].logs) == ("1+1", "ran 1+1")
    assert (output[2].action.query, output[2].status) == ("cats", "completed")
    assert "found cats" in prompt_of(api)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == output
    assert [event.output_index for event in events if event.type == "response.output_item.added"] == [0, 1, 2, 3]


async def test_arguments_are_streamed(api):
    turns(api, says("note", text="a b c"), "Ready")
    events = await create(api, stream=True)
    deltas = [event.delta for event in events if event.type == "response.mcp_call_arguments.delta"]
    (whole,) = [event.arguments for event in events if event.type == "response.mcp_call_arguments.done"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole


@pytest.mark.parametrize(
    ("call", "shown"),
    [(says("broken"), "broken"), (says("note", x=1), "text"), (SAY % '{"name": "note", "arguments": [1]}', "object")],
)
async def test_what_fails_is_shown_to_the_model(api, call, shown):
    turns(api, call, "I see")
    response = await create(api)
    failed = response.output[1]
    assert (failed.type, failed.status, failed.output) == ("mcp_call", "failed", None)
    assert shown in failed.error
    assert failed.error in prompt_of(api)
    assert response.output_text == "I see"


async def test_slow_calls_end(api, monkeypatch):
    monkeypatch.setattr(tool_servers, "CALL_S", 0.2)
    turns(api, says("slow"), says("note", text="after"), "Ready")
    response = await create(api)
    assert "longer than 0.2 s" in response.output[1].error
    assert response.output[2].status == "completed"


async def test_calls_are_limited(api):
    turns(api, says("note", text="x"))
    response = await create(api, max_tool_calls=2)
    calls = [item for item in response.output if item.type == "mcp_call"]
    assert [call.status for call in calls] == ["completed", "completed"]
    assert "<tool_call>" in response.output_text
    assert len(api.service.adds) == 3


async def test_turns_are_limited(api):
    turns(api, says("note", text="x"))
    response = await create(api)
    assert len([item for item in response.output if item.type == "mcp_call"]) == 16
    assert response.status == "completed"


async def test_tokens_are_limited(api):
    turns(api, says("note", text="x"))
    response = await create(api, max_output_tokens=len(api.ids(says("note", text="x"))))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    api.scripts(Script([api.ids(says("note", text="x")[:-18])], "length"))
    response = await create(api)
    assert (response.status, response.output[-1].status) == ("incomplete", "incomplete")
    assert len(api.service.adds) == 2


async def test_functions_are_the_client_s(api):
    own = {"type": "function", "name": "own", "parameters": {"type": "object"}}
    turns(api, says("note", text="x") + says("own"), "never")
    response = await create(api, tools=[own, mcp()])
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "function_call"]
    assert response.output[1].status == "completed"
    assert len(api.service.adds) == 1


async def test_later_turns_know_earlier_calls(api):
    turns(api, says("note", text="x"), "Noted", "Yes")
    async with client_of(api) as client:
        first = await client.responses.create(model=MODEL, input="hi", tools=[mcp()])
        second = await client.responses.create(
            model=MODEL, input="And?", tools=[mcp()], previous_response_id=first.id, background=True
        )
        second = await finished(client, second.id)
    assert [item.type for item in second.output] == ["message"]
    assert "Noted" in prompt_of(api)


async def test_a_forced_call_is_forced_once(address):
    api = make(address, tool_parser=None, auto_tools=False)
    turns(api, '{"text": "x"}', "Ready")
    choice = {"type": "mcp", "server_label": "stub", "name": "note"}
    response = await create(api, tool_choice=choice)
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "message"]
    assert api.service.adds[1].sampling.structured_outputs is None


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([mcp("other")], "none of the tool servers"),
        ([mcp(server_url="http://127.0.0.1:1/mcp")], "none of the tool servers"),
        ([mcp(allowed_tools=["nope"])], "nope"),
        ([mcp(allowed_tools=5)], "allowed_tools"),
        ([{**mcp(), "require_approval": "always"}], "require_approval"),
        ([mcp(headers={"a": "b"})], "headers"),
        ([{"type": "mcp"}], "server_label"),
        ([mcp(), mcp()], "note|broken"),
        ([mcp(), {"type": "function", "name": "note"}], "note"),
        ([{"type": "file_search"}], "file_search"),
    ],
)
async def test_refused(api, tools, message):
    with pytest.raises(openai.BadRequestError, match=message):
        await create(api, tools=tools)
    assert not api.service.adds


async def test_without_servers():
    for kind in ("mcp", "code_interpreter", "web_search_preview"):
        with pytest.raises(openai.BadRequestError, match="--tool-server"):
            await create(make(), tools=[{**mcp(), "type": kind}])


async def test_a_cancelled_response_ends_its_turn(api):
    api.scripts(Script([api.ids(says("note", text="x"))], "stop"), Script([[70]], hang=True))
    async with client_of(api) as client:
        response = await client.responses.create(model=MODEL, input="hi", tools=[mcp()], background=True)
        async with asyncio.timeout(20):
            while len(api.service.streams) < 2:
                await asyncio.sleep(0.01)
        assert (await client.responses.cancel(response.id)).status == "cancelled"
    assert api.service.streams[1].aborted


async def test_a_server_that_has_gone(address):
    api = make(address)
    turns(api, says("note", text="x"), "Pity")
    (server,) = connect((address,))
    object.__setattr__(server, "address", "127.0.0.1:9")
    assert (await server.session().call("note", {})).failed


@pytest.mark.option("tool-server")
def test_option():
    def servers(given: str) -> tuple[str, ...]:
        arguments = ["models/SmolLM2-135M-Instruct.Q4_1.gguf", "--tool-server", given]
        return load(parse_arguments(arguments, registry())).serve.frontend.tool_servers

    assert servers("127.0.0.1:8000, [::1]:8000,localhost:1234") == ("127.0.0.1:8000", "[::1]:8000", "localhost:1234")
    assert servers("demo") == ("demo",)
    for wrong in ("", "localhost", "a:0", "a:99999", "demo,a:1", "http://a:1", "a:1,a:1", "[::1:8"):
        with pytest.raises(ConfigError, match="--tool-server"):
            servers(wrong)


def test_a_dead_endpoint_is_named():
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9"):
        connect(("127.0.0.1:9",))


async def test_demo():
    api = make("demo")
    turns(api, says("calculate", expression="6 * 7"), says("calculate", expression="x"), "It is 42.")
    response = await create(api, tools=[mcp("demo")])
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert response.output[1].output == "42"
    assert response.output[2].status == "failed"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("-(2 + 3) * 4 ** 2 % 7", "4"), ("7 // 2 / 2", "1.5"), ("+1e3", "1000.0"), ("2**-1", "0.5")],
)
def test_demo_calculates(expression, value):
    assert run_demo_tool("calculate", {"expression": expression}) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "(-8) ** 0.5",
        "1/0",
        "__import__('os')",
        "1j",
        "True",
        "x",
        "((((",
        "1" * 300,
        "9999**999",
        5,
        "",
    ],
)
def test_demo_refuses(expression):
    with pytest.raises(ValueError, match=r".+"):
        run_demo_tool("calculate", {"expression": expression})


def test_demo_tells_the_time():
    assert run_demo_tool("current_time", {}).endswith("+00:00")
    with pytest.raises(ValueError, match="nope"):
        run_demo_tool("nope", {})
