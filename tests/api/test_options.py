"""Options of the HTTP app, from the command line to what a client sees."""

import dataclasses
import json
import re

import pytest

from rayllm.errors import ConfigError

from ..options import serve_settings
from .conftest import Harness, ok, refused

MODELS, CHAT = "/v1/models", "/v1/chat/completions"
OWN = {"model_path", "served_model_names", "tokenizer_path", "max_model_len", "vocab_size", "eos_token_ids"}
MARKERS = """
async def mark(request, call_next):
    response = await call_next(request)
    response.headers["x-function"] = "1"
    return response


class Mark:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-class", b"1")]
            await send(message)

        await self.app(scope, receive, marked)


class Greedy:
    def __init__(self, app, more):
        pass


def plain(request):
    pass
"""


def served_by(*arguments):
    frontend = serve_settings(*arguments).frontend
    names = {field.name for field in dataclasses.fields(frontend)} - OWN
    return Harness(**{name: getattr(frontend, name) for name in names})


async def preflight(api, method="POST", origin="https://a.example", **more):
    headers = {"Origin": origin, "Access-Control-Request-Method": method, **more}
    return await api.request("OPTIONS", CHAT, headers=headers)


@pytest.mark.option("api-key")
async def test_api_keys():
    api = served_by("--api-key", "one", "two")
    for key, status in (("one", 200), ("two", 200), ("three", 401)):
        reply = await api.request("GET", MODELS, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == status
    refused(await api.request("GET", MODELS), 401)
    for headers, status in (
        ({"authorization": "bearer one"}, 200), ({"authorization": "Bearer  one "}, 200), ({"x-api-key": "one"}, 200),
        ({"authorization": "one"}, 401), ({"authorization": "Basic one"}, 401), ({"x-api-key": ""}, 401),
    ):  # fmt: skip
        assert (await api.request("GET", MODELS, headers=headers)).status_code == status
    reply = await api.request("POST", "/v1/messages", json={})
    assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
    assert reply.json()["type"] == "error"
    ok(await served_by().request("GET", MODELS))


@pytest.mark.option("allowed-origins")
async def test_allowed_origins():
    api = served_by("--allowed-origins", '["https://a.example"]')
    assert (await preflight(api)).headers["access-control-allow-origin"] == "https://a.example"
    other = await preflight(api, origin="https://b.example")
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers
    assert (await preflight(served_by(), origin="https://b.example")).status_code == 200


@pytest.mark.option("allowed-methods")
async def test_allowed_methods():
    api = served_by("--allowed-methods", '["GET"]')
    assert (await preflight(api, "POST")).status_code == 400
    assert (await preflight(api, "GET")).status_code == 200
    assert (await preflight(served_by(), "POST")).status_code == 200


@pytest.mark.option("allowed-headers")
async def test_allowed_headers():
    api = served_by("--allowed-headers", '["x-a"]')
    asked = "Access-Control-Request-Headers"
    assert (await preflight(api, **{asked: "x-b"})).status_code == 400
    assert (await preflight(api, **{asked: "x-a"})).status_code == 200
    assert (await preflight(served_by(), **{asked: "x-b"})).status_code == 200


@pytest.mark.option("allow-credentials")
async def test_allowed_credentials():
    headers = {"Origin": "https://a.example"}
    with_flag = await served_by("--allow-credentials").request("GET", MODELS, headers=headers)
    assert with_flag.headers["access-control-allow-credentials"] == "true"
    without = await served_by().request("GET", MODELS, headers=headers)
    assert "access-control-allow-credentials" not in without.headers


@pytest.mark.option("enable-request-id-headers")
async def test_request_ids():
    api = served_by("--enable-request-id-headers")
    for path, status in ((MODELS, 200), ("/nothing", 404)):
        reply = await api.request("GET", path, headers={"X-Request-Id": "my id/1"})
        assert (reply.status_code, reply.headers["x-request-id"]) == (status, "my id/1")
    answers = [await api.complete(), await api.complete(), await api.complete(stream=True)]
    assert len({reply.headers["x-request-id"] for reply in answers}) == 3
    assert answers[0].headers["x-request-id"] in ok(answers[0])["id"]
    assert "x-request-id" not in (await served_by().complete()).headers


@pytest.fixture
def markers(tmp_path, monkeypatch):
    (tmp_path / "markers_of_a_test.py").write_text(MARKERS)
    monkeypatch.syspath_prepend(tmp_path)
    return "markers_of_a_test"


@pytest.mark.option("middleware")
async def test_middleware(markers):
    api = served_by("--api-key", "k", "--middleware", f"{markers}.mark", "--middleware", f"{markers}:Mark")
    for path, status in ((MODELS, 401), ("/health", 200), ("/nothing", 404)):
        reply = await api.request("GET", path)
        assert reply.status_code == status
        assert (reply.headers["x-function"], reply.headers["x-class"]) == ("1", "1")
    api.script("one", "two")
    assert (await api.request("POST", CHAT, json={}, headers={"Authorization": "Bearer k"})).headers["x-class"] == "1"


@pytest.mark.parametrize("name", ["no.such.thing", "nothing", "{}.absent", "{}.plain", "{}.Mark.x", "{}.Greedy"])
def test_other_middleware_is_named(markers, name):
    path = name.format(markers)
    with pytest.raises(ConfigError, match=f"--middleware: '{re.escape(path)}'"):
        served_by("--middleware", path)


@pytest.mark.option("disable-fastapi-docs")
async def test_no_docs():
    for flags, status in (((), 200), (("--disable-fastapi-docs",), 404)):
        api = served_by(*flags)
        for path in ("/openapi.json", "/docs", "/redoc"):
            assert (await api.request("GET", path)).status_code == status
    ok(await api.request("GET", MODELS))


@pytest.mark.option("enable-offline-docs")
@pytest.mark.parametrize("root", ["", "/llm"])
async def test_offline_docs(root):
    api = served_by("--enable-offline-docs", *(("--root-path", root) if root else ()))
    for path in ("/docs", "/redoc"):
        page = (await api.request("GET", root + path)).text
        urls = re.findall(r"""(?:src|href|url|spec-url)\s*[=:]\s*["']([^"']+)""", page)
        assert len(urls) >= 3
        for url in urls:
            assert url.startswith(f"{root}/")
            assert (await api.request("GET", url)).status_code == 200
    outside = (await served_by().request("GET", "/docs")).text
    assert "https://" in outside


@pytest.mark.option("root-path")
async def test_root_path():
    api = served_by("--root-path", "/llm/")
    for prefix in ("", "/llm"):
        document = ok(await api.request("GET", f"{prefix}/openapi.json"))
        assert document["servers"] == [{"url": "/llm"}]
        assert json.dumps("/llm/openapi.json") in (await api.request("GET", f"{prefix}/docs")).text.replace("'", '"')
        ok(await api.request("GET", prefix + MODELS))
    assert "servers" not in ok(await served_by().request("GET", "/openapi.json"))
