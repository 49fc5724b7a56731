"""Options of the engine as a client of the HTTP app sees them, over a real engine, without Ray."""

import json

import httpx
import pytest

from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.engine.engine import Engine
from rayllm.serving.application import build_frontend
from rayllm.serving.fleet import Fleet
from rayllm.serving.session_server import SessionServer
from rayllm.serving.wire import SessionLimits
from tests.models import smollm2_gguf

from .conftest import FakeDirectory, until

pytestmark = [pytest.mark.slow, pytest.mark.smollm2]
BODY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def resolved():
    arguments = [
        str(smollm2_gguf()), "--served-model-name", "demo", "--max-model-len", "300", "--num-gpu-blocks-override", "40",
        "--stream-interval", "10", "--no-enable-chunked-prefill", "--logprobs-mode", "raw_logits",
        "--enable-logging-iteration-details", "--prefix-caching-hash-algo", "xxhash_cbor",
    ]  # fmt: skip
    return load(parse_arguments(arguments, registry()))


@pytest.fixture(scope="module")
def engine(resolved):
    engine = Engine.build(resolved.engine)
    sessions = SessionServer(engine, "e", SessionLimits())
    sessions.start()
    yield sessions
    sessions.shutdown()
    engine.shutdown()


@pytest.fixture
async def client(resolved, engine):
    """A client of the app that an HTTP process has, but for the directory in which it finds its engine."""
    limits = SessionLimits()
    app, service = build_frontend(resolved.serve.frontend, "http", limits)
    directory = FakeDirectory()
    directory.servers["e"] = engine
    service._fleet = Fleet(directory, "http", limits)
    service._fleet.start()
    service._attached.set()
    await until(lambda: service.healthy() is None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as one:
        yield one
    await service.close()


@pytest.mark.option("stream-interval", "enable-logging-iteration-details", "prefix-caching-hash-algo")
async def test_a_stream_has_few_pieces_and_the_same_text(client, logged):
    whole = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
    steps = [message for message in logged.messages if message.startswith("iteration ")]
    assert len(steps) == 20
    reply = await client.post("/v1/completions", json={**BODY, "stream": True})
    chunks = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: {")]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == whole
    assert 2 <= len(texts) <= 3


@pytest.mark.option("logprobs-mode")
async def test_logits_stand_where_logprobs_do(client):
    body = {**BODY, "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1}
    choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    values = choice["logprobs"]["token_logprobs"]
    assert all(value > 1 for value in values), "a log-probability is never above 0"
    for value, top in zip(values, choice["logprobs"]["top_logprobs"], strict=True):
        assert value == max(top.values())
    prompt = [next(iter(entry.values())) for entry in choice["prompt_logprobs"][1:]]
    assert all(entry["logprob"] > 1 for entry in prompt if entry["rank"] == 1)


@pytest.mark.option("enable-chunked-prefill")
async def test_a_prompt_that_a_step_cannot_hold_is_refused(client, engine):
    reply = await client.post("/v1/completions", json={**BODY, "prompt": [5] * 301})
    assert reply.status_code == 400
    assert "300 tokens" in reply.json()["error"]["message"]
    assert (await client.post("/v1/completions", json={**BODY, "prompt": [5] * 280})).status_code == 200
