"""Listening, health, reflection, and ending: what runs may finish, or is cut, as the shutdown timeout says."""

import asyncio

import grpc
import httpx
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from rayllm.api.fake import Script
from rayllm.config.serve import HttpSettings
from rayllm.errors import ConfigError
from rayllm.grpc.server import GrpcServer, reserve
from rayllm.serving.server import place_of

from .conftest import completion_request, until

pytestmark = pytest.mark.option("grpc")

SERVICE = "rayllm.v1.LLM"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def on_loopback(**kwargs):
    return HttpSettings(grpc=True, host="127.0.0.1", **{"port": 0, **kwargs})


@pytest.mark.option("host", "port")
async def test_the_port_is_held_and_told(served):
    port = served.held.getsockname()[1]
    assert place_of(served.http, served.held) == f"127.0.0.1:{port}"
    assert (await served.complete()).choices
    # Another server of the same user is not let in by way of SO_REUSEPORT.
    with pytest.raises(ConfigError, match=f"--port: cannot listen on 127.0.0.1:{port}"):
        reserve(on_loopback(port=port))


async def test_plain_http_fails(served):
    await served.complete()
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.HTTPError):
            await client.get(f"http://{served.address}/v1/models")


@pytest.mark.option("uds")
async def test_a_unix_socket(make_served, tmp_path):
    path = str(tmp_path / "grpc")
    served = await make_served(http=on_loopback(uds=path))
    assert place_of(served.http, served.held) == f"unix:{path}"
    assert (await served.complete()).choices
    with pytest.raises(ConfigError, match="--uds"):
        reserve(on_loopback(uds=path))


@pytest.mark.option("api-server-count")
async def test_servers_share_a_port(served):
    """As those of several processes do."""
    second = GrpcServer(served.app, lambda: "only the other is healthy", served.http, 1 << 20, served.held)
    second.start()
    seen = set()
    async with asyncio.timeout(10):
        while len(seen) < 2:
            # A pool of its own, or all channels of a process share a connection.
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(served.address, options=options) as channel:
                seen.add((await HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status)
    assert seen == {SERVING, NOT_SERVING}
    await second.stop()


async def test_health_follows_the_engines(served, monkeypatch):
    monkeypatch.setattr("rayllm.grpc.server.HEALTH_EVERY_S", 0.01)
    served.service.unhealthy = "the engines are starting"
    for service in ("", SERVICE):
        watch = HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest(service=service))
        served.service.unhealthy = "the engines are starting"
        await _status(watch, NOT_SERVING)
        served.service.unhealthy = None
        await _status(watch, SERVING)
        watch.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() == StatusCode.NOT_FOUND


async def _status(watch, wanted):
    async with asyncio.timeout(5):
        while (await watch.read()).status != wanted:
            pass


async def test_reflection_tells_of_the_service(served):
    call = ServerReflectionStub(served.channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
    files = (await call.read()).file_descriptor_response.file_descriptor_proto
    assert any(b"StreamComplete" in file for file in files)
    call.cancel()


@pytest.mark.option("shutdown-timeout")
class TestEnding:
    async def test_running_requests_may_finish(self, make_served):
        served = await make_served(http=on_loopback(shutdown_timeout_s=30))
        served.script("Hello", ", ", "world", delay=0.1)
        watch = HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        whole = asyncio.ensure_future(served.complete())
        stream = served.stream_complete()
        await stream.read()
        began = asyncio.get_running_loop().time()
        await served.server.stop()
        # Not held up by those who watch.
        assert asyncio.get_running_loop().time() - began < 10
        assert (await whole).choices[0].text == "Hello, world"
        last = None
        while (answer := await stream.read()) is not grpc.aio.EOF:
            last = answer
        assert last.HasField("usage")

    async def test_requests_that_take_too_long_are_cut(self, make_served):
        served = await make_served(http=on_loopback())
        served.scripts(Script([[70]], hang=True))
        call = served.stub.Complete(completion_request())
        await until(lambda: served.service.streams)
        async with asyncio.timeout(4):
            await served.server.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert served.service.streams[0].aborted == "abort"
