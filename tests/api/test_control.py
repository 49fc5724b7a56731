"""Endpoints that act on engines."""

import pytest

from rayllm.errors import RayLLMError, RequestError
from rayllm.messages.engine import AbortNamed, CallWorkers, IsPaused, Pause, ResetPrefixCache, Resume

from .conftest import ok, refused

DEV = [("POST", "/reset_prefix_cache"), ("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"),
       ("POST", "/collective_rpc"), ("GET", "/server_info")]  # fmt: skip


@pytest.fixture
def dev(make_api):
    return make_api(dev_mode=True)


async def post(api, path, **params):
    return await api.request("POST", path, params=params)


async def test_only_in_the_development_mode_and_with_a_key(api, make_api):
    for method, path in DEV:
        refused(await api.request(method, path), 404)
        refused(await make_api(dev_mode=True, api_keys=("k",)).request(method, path), 401)


async def test_aborts(api):
    api.service.answer = 2
    body = ok(await api.request("POST", "/inference/v1/abort_requests", json={"request_ids": ["a", "b"]}))
    assert (body, api.service.commands) == ({"aborted": 2}, [AbortNamed(["a", "b"])])
    refused(await api.request("POST", "/inference/v1/abort_requests", json={"request_ids": "a"}))


async def test_reset(dev):
    ok(await post(dev, "/reset_prefix_cache"))
    ok(await post(dev, "/reset_prefix_cache", reset_running_requests="true"))
    assert dev.service.commands == [ResetPrefixCache(False), ResetPrefixCache(True)]
    assert refused(await post(dev, "/reset_prefix_cache", reset_external="true"))["param"] == "reset_external"
    assert refused(await post(dev, "/reset_prefix_cache", other="1"))["param"] == "other"


async def test_pauses(dev):
    ok(await post(dev, "/pause"))
    ok(await post(dev, "/pause", mode="keep"))
    ok(await post(dev, "/pause", mode="wait", clear_cache="false"))
    ok(await post(dev, "/resume"))
    assert dev.service.commands == [Pause("abort"), ResetPrefixCache(), Pause("keep"), Pause("wait"), Resume()]
    dev.service.answer = True
    assert ok(await dev.request("GET", "/is_paused")) == {"is_paused": True}
    assert dev.service.commands[-1] == IsPaused()
    assert refused(await post(dev, "/pause", mode="now"))["param"] == "mode"
    assert refused(await post(dev, "/pause", clear_cache="maybe"))["param"] == "clear_cache"


async def test_calls(dev):
    dev.service.answer = [1, {"a": None}]
    body = {"method": "look", "args": [1], "kwargs": {"b": 2}, "timeout": 5}
    assert ok(await dev.request("POST", "/collective_rpc", json=body)) == {"results": [1, {"a": None}]}
    assert dev.service.commands == [CallWorkers("look", [1], {"b": 2})]
    for wrong in ({}, {"method": "_look"}, {"method": "look", "args": 1}):
        refused(await dev.request("POST", "/collective_rpc", json=wrong))


async def test_calls_that_fail(dev, monkeypatch):
    async def fail(command):
        raise failure

    monkeypatch.setattr(dev.service, "command", fail)
    for failure, status in ((RequestError("no method"), 400), (RayLLMError("disk full"), 500), (TimeoutError(), 504)):
        reply = await dev.request("POST", "/collective_rpc", json={"method": "look", "timeout": 1})
        message = refused(reply, status)["message"]
        assert str(failure) in message


async def test_server_info(make_api):
    dev = make_api(dev_mode=True, seed=77)
    assert "seed=77" in ok(await dev.request("GET", "/server_info"))["rayllm_config"]
    config = ok(await dev.request("GET", "/server_info", params={"config_format": "json"}))["rayllm_config"]
    assert config["seed"] == 77
    assert "api_keys" not in config
    refused(await dev.request("GET", "/server_info", params={"config_format": "xml"}))
