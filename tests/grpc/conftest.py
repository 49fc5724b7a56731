"""A gRPC server over a fake service, in this process, on a free port of the loopback interface."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest

from rayllm.config.serve import HttpSettings
from rayllm.grpc import rayllm_pb2 as pb
from rayllm.grpc.rayllm_pb2_grpc import LLMStub
from rayllm.grpc.server import GrpcServer, reserve

from ..api.conftest import MODEL, Harness


class Served(Harness):
    """A server, the fake behind it, and shorthands to call it."""

    def __init__(self, http: HttpSettings | None = None, max_bytes: int = 64 << 20, **settings: Any) -> None:
        super().__init__(**settings)
        self.http = http or HttpSettings(grpc=True, host="127.0.0.1", port=0)
        self.held = reserve(self.http)
        self.server = GrpcServer(self.app, self.service.healthy, self.http, max_bytes, self.held)
        self.server.start()
        uds = self.http.uds
        self.address = f"unix:{uds}" if uds else f"127.0.0.1:{self.held.getsockname()[1]}"
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub = LLMStub(self.channel)

    async def chat(self, **parameters: Any) -> pb.Answer:
        return await self.stub.Chat(chat_request(**parameters))

    def stream_chat(self, **parameters: Any) -> Any:
        return self.stub.StreamChat(chat_request(**parameters))

    async def complete(self, text: str = "hi", **parameters: Any) -> pb.Answer:
        return await self.stub.Complete(completion_request(text, **parameters))

    def stream_complete(self, text: str = "hi", **parameters: Any) -> Any:
        return self.stub.StreamComplete(completion_request(text, **parameters))

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop()
        self.held.close()


async def until(check: Callable[[], bool]) -> None:
    """Wait for what goes over a socket."""
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.005)


def chat_request(**parameters: Any) -> pb.ChatRequest:
    messages = [pb.Message(role="user", content="hi")]
    return pb.ChatRequest(model=MODEL, messages=messages, parameters=pb.Parameters(**parameters))


def completion_request(text: str = "hi", **parameters: Any) -> pb.CompletionRequest:
    return pb.CompletionRequest(model=MODEL, text=text, parameters=pb.Parameters(**parameters))


@pytest.fixture
async def make_served() -> AsyncIterator[Any]:
    """Makes servers, and ends them after the test."""
    made: list[Served] = []

    async def make(**kwargs: Any) -> Served:
        made.append(Served(**kwargs))
        return made[-1]

    yield make
    for served in made:
        await served.close()


@pytest.fixture
async def served(make_served: Any) -> Served:
    return await make_served()
