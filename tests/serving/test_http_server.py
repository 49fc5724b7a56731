"""Listening, limits, access log, and ending: what runs may finish, or is cut, as the shutdown timeout says."""

import asyncio
import re
import socket

import httpx
import pytest
from fastapi import FastAPI

from rayllm.config.serve import HttpSettings
from rayllm.errors import ConfigError
from rayllm.logs import hide_paths
from rayllm.serving.http_server import HttpServer, bind, url_of

from ..launch import free_port
from ..options import serve_settings

QUIET = ("--uvicorn-log-level", "critical")


def make_app(seconds):
    app = FastAPI()

    @app.get("/")
    async def answer():
        await asyncio.sleep(seconds)
        return "done"

    return app


def on_loopback(**kwargs):
    return HttpSettings(host="127.0.0.1", port=0, log_level="critical", access_log=False, **kwargs)


def options(*flags):
    return serve_settings("--host", "127.0.0.1", "--port", "0", *flags).http


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


async def answers(url):
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(url)).json() == "done"
        except httpx.ConnectError:
            return False


@pytest.mark.option("host", "port")
async def test_only_the_named_place_is_listened_at():
    port = free_port()
    server, url = await started(serve_settings("--host", "127.0.0.1", "--port", str(port), *QUIET).http)
    assert url == f"http://127.0.0.1:{port}"
    assert await answers(url)
    # Linux has all of 127.0.0.0/8 on the loopback interface.
    assert not await answers(f"http://127.0.0.2:{port}")
    assert not await answers(f"http://127.0.0.1:{free_port()}")
    await server.stop()


@pytest.mark.option("uds")
async def test_a_unix_socket(tmp_path):
    path, port = str(tmp_path / "http"), free_port()
    server, url = await started(options("--port", str(port), "--uds", path, *QUIET))
    assert url == f"unix:{path}"
    assert not await answers(f"http://127.0.0.1:{port}")
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


@pytest.mark.option("shutdown-timeout")
async def test_running_requests_may_finish():
    server, url = await started(options("--shutdown-timeout", "5", *QUIET), seconds=0.3)
    async with httpx.AsyncClient() as client:
        request = asyncio.ensure_future(client.get(url))
        await asyncio.sleep(0.1)
        await server.stop()
        assert (await request).json() == "done"


@pytest.mark.option("shutdown-timeout")
async def test_requests_that_take_too_long_are_cut():
    server, url = await started(options(*QUIET), seconds=60)
    async with httpx.AsyncClient() as client:
        request = asyncio.ensure_future(client.get(url, timeout=30))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(4):
            await server.stop()
        with pytest.raises((httpx.HTTPError, AssertionError)):
            assert (await request).status_code == 200


@pytest.fixture
async def logged(capsys):
    """What uvicorn logs while a server with some options answers a few requests."""

    async def lines(*flags):
        server, url = await started(options(*flags))
        async with httpx.AsyncClient() as client:
            for path in ("/", "/health", "/health?x=1", "/llm/health", "/v1/models"):
                await client.get(url + path)
        await server.stop()
        out, err = capsys.readouterr()
        return (out + err).splitlines()

    yield lines
    hide_paths(frozenset())


def paths(lines):
    """Those of access lines."""
    return [match[1] for line in lines if (match := re.search(r'"GET (\S+) HTTP/1.1" \d+', line))]


@pytest.mark.option("uvicorn-log-level")
async def test_levels_of_the_log(logged):
    usual, less, more = await logged(), await logged("--uvicorn-log-level", "warning"), None
    more = await logged("--uvicorn-log-level", "debug")
    assert any("Started server process" in line for line in usual)
    assert len(paths(usual)) == 5
    assert less == []
    assert len(more) > len(usual)
    assert len(await logged("--uvicorn-log-level", "trace")) > len(more)


@pytest.mark.option("disable-uvicorn-access-log")
async def test_no_access_log(logged):
    lines = await logged("--disable-uvicorn-access-log")
    assert paths(lines) == []
    assert any("Started server process" in line for line in lines)
    assert len(paths(await logged())) == 5


@pytest.mark.option("disable-access-log-for-endpoints")
async def test_paths_out_of_the_access_log(logged):
    flags = ("--disable-access-log-for-endpoints", "/health,/metrics")
    assert paths(await logged(*flags)) == ["/", "/llm/health", "/v1/models"]
    assert paths(await logged(*flags, "--root-path", "/llm")) == ["/", "/v1/models"]
    assert len(paths(await logged())) == 5


async def sent(url, *parts):
    """The status line of the answer to bytes that come one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.02)
    status = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    return int(status.split()[1])


@pytest.mark.option("h11-max-incomplete-event-size")
async def test_long_heads():
    server, url = await started(options("--h11-max-incomplete-event-size", "2048", *QUIET))
    async with httpx.AsyncClient() as client:
        assert (await client.get(url, headers={"x-long": "a" * 4096})).status_code == 431
        assert (await client.get(url, headers={"x-long": "a" * 1000})).status_code == 200
        assert (await client.get(f"{url}/{'a' * 4096}")).status_code == 431
        # Of a body there may be more.
        assert (await client.post(url, content=b"a" * 100_000)).status_code == 405
    begin = b"GET / HTTP/1.1\r\nhost: x\r\n"
    assert await sent(url, begin + b"x-endless: ", b"a" * 2000, b"a" * 2000) == 431
    # Requests on one connection are counted apart.
    assert await sent(url, b"".join([begin + b"x-long: " + b"a" * 1000 + b"\r\n\r\n"] * 5)) == 200
    await server.stop()
    server, url = await started(options(*QUIET))
    async with httpx.AsyncClient() as client:
        assert (await client.get(url, headers={"x-long": "a" * 4096})).status_code == 200
    await server.stop()


@pytest.mark.option("h11-max-header-count")
async def test_many_headers():
    headers = {f"x-{number}": "1" for number in range(20)}
    for flags, status in ((("--h11-max-header-count", "10"), 431), ((), 200)):
        server, url = await started(options(*flags, *QUIET))
        async with httpx.AsyncClient() as client:
            assert (await client.get(url, headers=headers)).status_code == status
            assert (await client.get(url)).status_code == 200
        endless = [f"y-{number}: 1\r\n".encode() for number in range(3)]
        if status == 431:
            assert await sent(url, b"GET / HTTP/1.1\r\n", *[b"".join(endless)] * 5) == 431
        await server.stop()
