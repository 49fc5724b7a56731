"""Listening, and ending: what runs may finish, or is cut, as the shutdown timeout says."""

import asyncio
import socket

import httpx
import pytest
from fastapi import FastAPI

from rayllm.config.serve import HttpSettings
from rayllm.errors import ConfigError
from rayllm.serving.http_server import HttpServer, bind, url_of


def make_app(seconds):
    app = FastAPI()

    @app.get("/")
    async def answer():
        await asyncio.sleep(seconds)
        return "done"

    return app


def on_loopback(**kwargs):
    return HttpSettings(host="127.0.0.1", port=0, log_level="critical", access_log=False, **kwargs)


async def started(http, seconds=0.0):
    listener = bind(http)
    server = HttpServer(make_app(seconds), http, listener)
    server.start()
    return server, url_of(listener)


async def test_a_free_port_is_taken_and_told():
    server, url = await started(on_loopback())
    async with httpx.AsyncClient() as client:
        assert (await client.get(url)).json() == "done"
    await server.stop()


async def test_a_unix_socket(tmp_path):
    path = str(tmp_path / "http")
    server, url = await started(on_loopback(uds=path))
    assert url == f"unix:{path}"
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path)) as client:
        assert (await client.get("http://x/")).json() == "done"
    with pytest.raises(ConfigError, match="--uds"):
        bind(on_loopback(uds=path))
    await server.stop()
    # What a killed server leaves is no hindrance.
    bind(on_loopback(uds=path)).close()


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            bind(HttpSettings(host="127.0.0.1", port=taken.getsockname()[1]))


def test_an_address_of_another_machine_is_named():
    with pytest.raises(ConfigError, match=r"--port|--host"):
        bind(HttpSettings(host="198.51.100.7", port=0))


async def test_running_requests_may_finish():
    server, url = await started(on_loopback(shutdown_timeout_s=5), seconds=0.3)
    async with httpx.AsyncClient() as client:
        request = asyncio.ensure_future(client.get(url))
        await asyncio.sleep(0.1)
        await server.stop()
        assert (await request).json() == "done"


async def test_requests_that_take_too_long_are_cut():
    server, url = await started(on_loopback(), seconds=60)
    async with httpx.AsyncClient() as client:
        request = asyncio.ensure_future(client.get(url, timeout=30))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(4):
            await server.stop()
        with pytest.raises((httpx.HTTPError, AssertionError)):
            assert (await request).status_code == 200
