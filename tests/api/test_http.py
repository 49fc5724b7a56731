"""HTTP itself: bodies, errors of every kind, models, health, keys, CORS, ids."""

import asyncio
import json
import subprocess
import sys

import pytest

from rayllm.api.fake import Script
from rayllm.errors import EngineDead, Overloaded, ReplicaLost, RequestError

from .conftest import MAX_LEN, MODEL, events, finish, ok, refused, strict_json

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class TestBodies:
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[]",
            b"3",
            b'"x"',
            b"null",
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"model": "tiny", "prompt": "\xff"}',
            b'{"model": "tiny", "prompt": "bad \\ud83d tail"}',
            b'{"model": "tiny", "prompt": "a", "stop": "\\ude00"}',
            b'{"model": "\\ud83d", "prompt": "a"}',
            b'{"model": "tiny", "prompt": "a", "top_p": NaN}',
            b'\xef\xbb\xbf{"model": "tiny", "prompt": "a"}',
            b'{"model": "tiny", "prompt": "a"} x',
        ],
    )
    @pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
    async def test_malformed(self, api, path, body):
        refused(await api.request("POST", path, content=body))

    async def test_whole_pairs_are_fine(self, api):
        body = b'{"model": "tiny", "prompt": "good \\ud83d\\ude00 tail"}'
        assert (await api.request("POST", TEXT, content=body)).status_code == 200

    async def test_too_large(self, make_api):
        api = make_api(max_body_bytes=1000)
        refused(await api.complete(prompt="x" * 1000), 413)
        ok(await api.complete(prompt="x"))

    async def test_other_types_are_refused(self, api):
        body = json.dumps({"model": MODEL, "prompt": "a"})
        for kind, status in (("text/plain", 415), ("application/x-www-form-urlencoded", 415),
                             ("application/json; charset=utf-8", 200), ("application/vnd.api+json", 200)):  # fmt: skip
            reply = await api.request("POST", TEXT, content=body, headers={"Content-Type": kind})
            assert reply.status_code == status
            if status != 200:
                refused(reply, status)

    async def test_duplicate_and_null_fields(self, api):
        body = b'{"model": "nope", "model": "tiny", "prompt": "a", "n": null, "unknown": null}'
        assert (await api.request("POST", TEXT, content=body)).status_code == 200


class TestErrors:
    @pytest.mark.parametrize(("method", "path", "status"), [
        ("GET", "/nothing", 404), ("POST", "/v1/embeddings", 404), ("PUT", CHAT, 405), ("DELETE", "/v1/models", 405),
        ("PUT", "/health", 405), ("GET", "/", 404)])  # fmt: skip
    async def test_routes(self, api, method, path, status):
        refused(await api.request(method, path), status)

    async def test_unknown_model(self, api):
        for path, body in ((CHAT, {"messages": [{"role": "user", "content": "a"}]}), (TEXT, {"prompt": "a"}),
                           ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):  # fmt: skip
            for stream in ({}, {"stream": True}) if path.startswith("/v1") else ({},):
                error = refused(await api.post(path, **{**body, **stream, "model": "no-such-model"}), 404)
                assert error["code"] == "model_not_found"
                assert "no-such-model" in error["message"]
        refused(await api.complete(model=""), 404)
        error = refused(await api.request("GET", "/v1/models/no-such-model"), 404)
        assert error["code"] == "model_not_found"

    async def test_aliases(self, api):
        for model in (MODEL, "alias"):
            assert ok(await api.complete(model=model))["model"] == MODEL
        body = {"prompt": "a"}
        assert ok(await api.request("POST", TEXT, json=body))["model"] == MODEL

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("failure", "status"), [
        (Overloaded("the queue is full", 3.0), 503), (RequestError("no", "prompt"), 400), (EngineDead("x"), 503),
        (ReplicaLost("x"), 503), (KeyError("secret"), 500), (RecursionError(), 500)])  # fmt: skip
    async def test_refusals_come_as_a_status(self, api, failure, status, stream):
        api.service.refusal = failure
        reply = await api.complete(stream=stream)
        error = refused(reply, status)
        assert "secret" not in error["message"]
        if isinstance(failure, Overloaded):
            assert reply.headers["retry-after"] == "3"

    @pytest.mark.parametrize("failure", [ReplicaLost("x"), KeyError("secret"), None])
    async def test_failures_midway(self, api, failure):
        end = {"failure": failure} if failure else {"finish_reason": "error"}
        for n in (1, 3):
            api.scripts(Script([api.ids("a"), api.ids("b")], **end))
            refused(await api.complete(n=n), 503 if isinstance(failure, ReplicaLost) else 500)
            reply = await api.complete(n=n, stream=True)
            chunks = events(reply)
            assert "error" in chunks[-1]
            assert "secret" not in reply.text
            assert [finish(chunks[:-1], i) for i in range(n)] == [[]] * n

    async def test_an_abort_by_the_server_leaves_what_there_is(self, api):
        api.script("a", finish_reason="abort")
        choice = ok(await api.complete())["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("a", "abort")


class TestIds:
    @pytest.mark.parametrize(
        "header", ["same-id", "x" * 10_000, "\u00e9\u00fc".encode("latin-1"), b"\xff\xfe", "a b/{}"]
    )
    async def test_header(self, api, header):
        headers = {"X-Request-Id": header}
        calls = (api.request("POST", TEXT, json={"prompt": f"p{i}"}, headers=headers) for i in range(10))
        replies = await asyncio.gather(*calls)
        ids = [ok(reply)["id"] for reply in replies]
        assert len(set(ids)) == 10
        assert all(len(id_) < 100 and id_.isascii() for id_ in ids)
        if header == "same-id":
            assert all("same-id" in id_ for id_ in ids)

    async def test_header_in_the_answer(self, make_api):
        reply = await make_api(request_id_headers=True).complete()
        assert reply.headers["x-request-id"] in ok(reply)["id"]
        assert "x-request-id" not in (await make_api().complete()).headers

    async def test_field(self, api):
        assert "mine" in ok(await api.complete(request_id="mine"))["id"]


class TestInfo:
    async def test_models(self, api):
        cards = ok(await api.request("GET", "/v1/models"))["data"]
        assert [card["id"] for card in cards] == [MODEL, "alias"]
        assert {card["max_model_len"] for card in cards} == {MAX_LEN}
        assert ok(await api.request("GET", "/v1/models/alias")) == cards[1]
        assert ok(await api.request("GET", "/v1/models/"))["data"] == cards

    async def test_names_with_slashes(self, make_api):
        api = make_api(served_model_names=("org/model",))
        assert ok(await api.request("GET", "/v1/models/org/model"))["id"] == "org/model"

    async def test_health(self, api):
        for path in ("/health", "/ping"):
            assert (await api.request("GET", path)).status_code == 200
        api.service.unhealthy = "no engine serves"
        assert "no engine" in refused(await api.request("GET", "/health"), 503)["message"]
        refused(await api.request("GET", "/ping"), 503)

    async def test_version_load_metrics(self, api):
        assert ok(await api.request("GET", "/version"))["version"]
        assert ok(await api.request("GET", "/load")) == {"server_load": 0}
        reply = await api.request("GET", "/metrics")
        assert reply.text == "fake_requests_total 0\n"
        assert reply.headers["content-type"].startswith("text/plain")


class TestTokens:
    async def test_text(self, api):
        text = "Hello 龜"
        body = ok(await api.post("/tokenize", prompt=text, return_token_strs=True))
        assert body["tokens"] == api.tokenizer.encode(text)
        assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), MAX_LEN)
        assert body["token_strs"] == [api.tokenizer.token_text(i) for i in body["tokens"]]
        assert ok(await api.post("/detokenize", tokens=body["tokens"])) == {"prompt": text}
        assert ok(await api.post("/tokenize", prompt=text))["token_strs"] is None

    async def test_conversation(self, api):
        messages = [{"role": "user", "content": "hi"}]
        ids = ok(await api.post("/tokenize", messages=messages))["tokens"]
        ok(await api.chat(messages=messages))
        assert ids == api.service.adds[0].prompt_token_ids
        shorter = ok(await api.post("/tokenize", messages=messages, add_generation_prompt=False))["tokens"]
        assert shorter == ids[: len(shorter)] != ids

    @pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": 5}, {"prompt": "a", "x": 1}])
    async def test_refused(self, api, body):
        refused(await api.post("/tokenize", **body))

    async def test_ids_outside_the_vocabulary(self, api):
        for ids in ([-1], [api.vocab], ["a"], [1.5], 3, None):
            assert refused(await api.post("/detokenize", tokens=ids))["param"] == "tokens"


class TestKeys:
    @pytest.fixture
    def guarded(self, make_api):
        return make_api(api_keys=("one", "two"))

    async def test_right_and_wrong(self, guarded):
        for header, status in (("Bearer one", 200), ("bearer two", 200), ("Bearer three", 401), ("one", 401),
                               ("", 401), ("Basic one", 401), (b"Bearer \xff", 401)):  # fmt: skip
            reply = await guarded.request("GET", "/v1/models", headers={"Authorization": header})
            assert reply.status_code == status
            if status == 401:
                refused(reply, 401)
        refused(await guarded.complete(), 401)

    async def test_other_paths_are_open(self, guarded):
        assert (await guarded.request("GET", "/health")).status_code == 200
        assert (await guarded.request("GET", "/metrics")).status_code == 200

    async def test_refused_before_routing(self, guarded):
        refused(await guarded.request("GET", "/v1/nothing"), 401)


async def test_cors(make_api):
    api = make_api(allowed_origins=("https://a.example",), api_keys=("k",))
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    reply = await api.request("OPTIONS", CHAT, headers=headers)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    refusal = await api.request("GET", "/v1/models", headers={"Origin": "https://a.example"})
    assert refusal.headers["access-control-allow-origin"] == "https://a.example"


async def test_root_path(make_api):
    api = make_api(root_path="/llm", api_keys=("k",))
    headers = {"Authorization": "Bearer k"}
    for path in ("/v1/models", "/llm/v1/models"):
        refused(await api.request("GET", path), 401)
        assert (await api.request("GET", path, headers=headers)).status_code == 200


async def test_what_clients_probe(api):
    """Open WebUI and its like look for models, and for other kinds of servers."""
    cards = ok(await api.request("GET", "/v1/models?limit=5"))["data"]
    assert [(card["id"], card["object"], card["max_model_len"]) for card in cards] == [
        (name, "model", 64) for name in ("tiny", "alias")
    ]
    assert ok(await api.request("GET", "/v1/models/tiny")) == cards[0]
    assert (await api.request("HEAD", "/v1/models")).status_code == 200
    for method, path in (
        ("GET", "/api/tags"), ("GET", "/api/version"), ("POST", "/api/chat"), ("GET", "/props"), ("GET", "/"),
        ("POST", "/v1/embeddings"), ("GET", "/v1/models/other"),
    ):  # fmt: skip
        refused(await api.request(method, path, json={}), 404)
    refused(await api.request("PUT", CHAT), 405)


async def test_the_api_is_described(api):
    document = ok(await api.request("GET", "/openapi.json"))
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {(method, route.path.replace(":path", "")) for route in api.app.routes for method in route.methods}
    aside = {path for _, path in served if path.startswith(("/docs", "/redoc", "/openapi"))}
    assert described == {(m, p) for m, p in served if m != "HEAD" and p not in aside} - {("POST", "/ping")}
    assert "temperature" in document["components"]["schemas"]["ChatRequest"]["properties"]
    assert (await api.request("GET", "/docs")).status_code == 200


async def test_every_event_is_strict_utf8_json(api):
    api.scripts(Script([[i] for i in api.ids('龜🫠é\u2028\u0000"\\')]))
    reply = await api.chat(stream=True)
    for block in reply.content.split(b"\n\n"):
        if block and block != b"data: [DONE]":
            assert b"\n" not in block
            strict_json(block.removeprefix(b"data: "))


def test_neither_torch_nor_ray_is_imported():
    unwanted = "{'torch', 'ray', 'transformers'}"
    code = f"import sys, rayllm.api.app, rayllm.api.fake; sys.exit(str({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "set()"
