"""The app under a real HTTP server, with the official client."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import openai
import pytest
import uvicorn

from rayllm.api.fake import Script

from .conftest import MODEL, Harness


class Server:
    """The app under uvicorn, in a thread, on a free port of the loopback interface."""

    def __init__(self) -> None:
        self.api = Harness(max_model_len=100_000)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        config = uvicorn.Config(self.api.app, log_level="error", lifespan="off", ws="none")
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.uvicorn.serve([self.socket])), daemon=True)
        self.thread.start()
        wait_for(lambda: self.uvicorn.started)

    def close(self) -> None:
        self.uvicorn.should_exit = True
        self.uvicorn.force_exit = True
        self.thread.join(5)

    def post(self, path: str, **body: object) -> socket.socket:
        """An open connection on which the request has been sent."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        data = json.dumps({"model": MODEL, **body}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        sock.sendall(head.encode() + data)
        return sock


def wait_for(check: object, limit: float = 5.0) -> None:
    end = time.monotonic() + limit
    while not check():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(scope="module")
def shared():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server(shared):
    shared.api.service.streams.clear()
    shared.api.script("Hello", ", ", "world")
    return shared


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


SAY = [{"role": "user", "content": "hi"}]


class TestOfficialClient:
    def test_chat(self, client):
        reply = client.chat.completions.create(model=MODEL, messages=SAY, logprobs=True, top_logprobs=2, n=2)
        assert [c.message.content for c in reply.choices] == ["Hello, world"] * 2
        assert len(reply.choices[0].logprobs.content) == reply.usage.completion_tokens // 2

    def test_chat_streamed(self, client):
        options = {"include_usage": True}
        stream = client.chat.completions.create(model=MODEL, messages=SAY, stream=True, stream_options=options)
        *chunks, last = stream
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello, world"
        assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens

    def test_completions(self, client):
        reply = client.completions.create(model=MODEL, prompt=["a", "b"], echo=True, logprobs=1)
        assert [c.text for c in reply.choices] == ["aHello, world", "bHello, world"]
        stream = client.completions.create(model=MODEL, prompt="a", stream=True)
        assert "".join(c.choices[0].text for c in stream) == "Hello, world"

    def test_errors(self, client):
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model=MODEL, messages=SAY, temperature=3)
        with pytest.raises(openai.NotFoundError, match="nope"):
            client.chat.completions.create(model="nope", messages=SAY)
        with pytest.raises(openai.BadRequestError, match="tool"):
            client.chat.completions.create(
                model=MODEL, messages=SAY, tools=[{"type": "function", "function": {"name": "f"}}]
            )

    def test_error_in_a_stream(self, server, client):
        server.api.script("a", finish_reason="error")
        stream = client.completions.create(model=MODEL, prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="script"):
            list(stream)

    def test_models(self, client):
        assert [model.id for model in client.models.list()] == [MODEL, "alias"]
        assert client.models.retrieve("alias").id == "alias"

    async def test_async_client_and_helper(self, server):
        server.api.script("Hello, world", finish_reason="stop")
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
            async with client.chat.completions.stream(model=MODEL, messages=SAY) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == "Hello, world"


@pytest.mark.parametrize("stream", [False, True])
def test_closed_sockets_abort(server, stream):
    server.api.scripts(Script([[70]], hang=True))
    socks = [server.post("/v1/completions", prompt="hi", stream=stream) for _ in range(5)]
    wait_for(lambda: len(server.api.service.streams) == 5)
    if stream:
        for sock in socks:
            assert b"200" in sock.recv(4096)
    assert server.api.service.running() == 5
    for sock in socks:
        sock.close()
    wait_for(lambda: server.api.service.running() == 0)


def test_stalled_readers_hold_nothing_up(server):
    # Some 50 MB of log-probabilities each, far more than sockets buffer.
    server.api.scripts(Script([[70] * 50] * 1000))
    body = {"messages": SAY, "stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 50_000}
    socks = [server.post("/v1/chat/completions", **body) for _ in range(3)]
    wait_for(lambda: len(server.api.service.streams) == 3)
    taken = []
    while taken != (taken := [stream.taken for stream in server.api.service.streams]):
        time.sleep(0.2)
    assert max(taken) < 500
    start = time.monotonic()
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=5)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in sock.recv(100)
    assert time.monotonic() - start < 1
    for sock in socks:
        sock.close()
    wait_for(lambda: server.api.service.running() == 0)


def test_long_headers_are_no_server_error(server):
    for value in (b"x" * 10_000, "é".encode("latin-1")):
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=5)) as sock:
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + value + b"\r\n\r\n")
            assert sock.recv(100).split()[1] in (b"200", b"400", b"431")
