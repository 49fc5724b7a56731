"""Clients that leave or read slowly."""

import asyncio
import json
from typing import Any

import pytest

from rayllm.api.fake import FakeStream, Script
from rayllm.messages.ingress import RequestOutput

from .conftest import MODEL


class Client:
    """Speaks ASGI to the app, and can stop reading or leave."""

    def __init__(self, api: Any, path: str, **body: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        self._left = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._body = [json.dumps({"model": MODEL, **body}).encode()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"",
                 "scheme": "http", "http_version": "1.1", "root_path": ""}  # fmt: skip
        self.task = asyncio.ensure_future(api.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self._reading.wait()
        self.sent.append(message)

    def leave(self) -> None:
        self._left.set()

    def stall(self) -> None:
        self._reading.clear()

    def read_on(self) -> None:
        self._reading.set()

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, 2)


async def until(check: Any) -> None:
    """Let other tasks run until the check holds."""
    async with asyncio.timeout(2):
        while not check():
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_aborts_all_its_choices(api, stream, n):
    api.scripts(Script([api.ids("a")], hang=True))
    client = Client(api, "/v1/completions", prompt="hi", n=n, stream=stream)
    await until(lambda: len(api.service.streams) == n and all(s.taken for s in api.service.streams))
    assert all(s.aborted is None for s in api.service.streams)
    client.leave()
    await client.ended()
    assert [s.aborted for s in api.service.streams] == ["abort"] * n
    assert len(asyncio.all_tasks()) == 1


async def test_a_client_that_leaves_while_queued(api):
    api.service.admission = 60
    client = Client(api, "/v1/completions", prompt="hi")
    await asyncio.sleep(0.01)
    client.leave()
    await client.ended()
    assert api.service.cancelled == 1
    assert client.sent == []


async def test_a_client_that_leaves_during_its_body(api):
    client = Client(api, "/v1/completions", prompt="hi")
    client._body.clear()
    client.leave()
    await client.ended()
    assert (client.sent, api.service.streams) == ([], [])


async def test_cancelling_the_app_aborts_too(api):
    api.scripts(Script([api.ids("a")], hang=True))
    client = Client(api, "/v1/completions", prompt="hi", stream=True)
    await until(lambda: api.service.streams and api.service.streams[0].taken)
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert api.service.streams[0].aborted == "abort"
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_a_finished_request_is_not_aborted(api):
    api.script("a", "b")
    for stream in (False, True):
        client = Client(api, "/v1/completions", prompt="hi", stream=stream)
        await client.ended()
    assert [s.aborted for s in api.service.streams] == [None, None]


async def test_a_failed_choice_aborts_the_others(api):
    for stream in (False, True):
        api.scripts(Script([[70]], failure=KeyError("x")), Script([[70]], hang=True))
        client = Client(api, "/v1/completions", prompt="hi", n=2, stream=stream)
        await client.ended()
        assert api.service.streams[-1].aborted == "abort"
        assert len(asyncio.all_tasks()) == 1


async def test_a_match_in_one_choice_leaves_the_others(api):
    api.scripts(Script([api.ids("a."), api.ids("b")], hang=True), Script([api.ids("c"), api.ids("d")]))
    client = Client(api, "/v1/completions", prompt="hi", n=2, stop=["."])
    await client.ended()
    assert [s.aborted for s in api.service.streams] == ["stop", None]


class EndlessStream(FakeStream):
    """Always has one more token."""

    async def __aiter__(self) -> Any:
        while True:
            self.taken += 1
            yield RequestOutput(0, [70])
            await asyncio.sleep(0)


@pytest.mark.parametrize("n", [1, 3])
async def test_nothing_is_taken_for_a_client_that_does_not_read(api, monkeypatch, n):
    monkeypatch.setattr("rayllm.api.fake.FakeStream", EndlessStream)
    client = Client(api, "/v1/completions", prompt="hi", n=n, stream=True, max_tokens=60)
    client.stall()
    await until(lambda: api.service.streams)
    await asyncio.sleep(0.02)
    taken = [s.taken for s in api.service.streams]
    assert all(count <= 2 for count in taken)
    client.read_on()
    await until(lambda: len(client.sent) > 20)
    client.leave()
    await client.ended()
    assert all(s.aborted == "abort" for s in api.service.streams)
