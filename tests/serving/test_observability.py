"""Metrics, traces and profiles of the whole way from HTTP to a real engine and back, without Ray."""

import gzip
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.engine.engine import Engine
from rayllm.serving.application import build_frontend
from rayllm.serving.fleet import Fleet
from rayllm.serving.session_server import SessionServer
from rayllm.serving.wire import SessionLimits
from tests.collector import attributes, http_collector
from tests.models import smollm2_gguf

from .conftest import FakeDirectory, until

pytestmark = [pytest.mark.slow, pytest.mark.smollm2]


@pytest.fixture(scope="module")
def collector():
    with http_collector() as one:
        yield one


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def resolved(collector, profiles):
    arguments = [
        smollm2_gguf(), "--served-model-name", "demo", "--max-model-len", "128", "--num-gpu-blocks-override", "12",
        "--kv-cache-metrics", "--kv-cache-metrics-sample", "1", "--enable-mfu-metrics",
        "--show-hidden-metrics-for-version", "0.1",
        "--otlp-traces-endpoint", collector.url, "--collect-detailed-traces", "all",
        "--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir", profiles,
        "--profiler-config.torch_profiler_with_stack", "false",
    ]  # fmt: skip
    return load(parse_arguments(list(map(str, arguments)), registry()))


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
    service._tracing.start()
    service._attached.set()
    await until(lambda: service.healthy() is None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as one:
        yield SimpleNamespace(http=one, service=service)
    await service.close()
    service._tracing._provider.shutdown()


async def complete(client, prompt, max_tokens):
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return (await client.http.post("/v1/completions", json=body)).json()


async def metrics(client):
    families = text_string_to_metric_families((await client.http.get("/metrics")).text)
    return {sample.name: sample.value for family in families for sample in family.samples}


@pytest.mark.option("kv-cache-metrics", "kv-cache-metrics-sample")
async def test_blocks_of_repeated_prompts_are_measured(client):
    for start in range(100, 700, 200):
        for turn in range(2):
            await complete(client, list(range(start, start + 90)), 1 + turn)
    found = await metrics(client)
    for name in ("lifetime", "idle_before_evict", "reuse_gap"):
        assert found[f"vllm:kv_block_{name}_seconds_count"] > 0


@pytest.mark.option("enable-mfu-metrics")
async def test_estimated_work_grows_with_the_tokens(client):
    names = [f"vllm:estimated_{name}_per_gpu_total" for name in ("flops", "read_bytes", "write_bytes")]

    async def work(tokens):
        before = await metrics(client)
        await complete(client, "Once", tokens)
        after = await metrics(client)
        return [after[name] - before[name] for name in names]

    few, many = await work(20), await work(40)
    assert all(1.5 * less < more < 2.5 * less for less, more in zip(few, many, strict=True))
    assert few[0] == pytest.approx(20 * 2 * 134.5e6, rel=0.05)  # two operations for each weight and token


@pytest.mark.option("show-hidden-metrics-for-version")
async def test_a_hidden_name_is_shown(client):
    assert "vllm:gpu_cache_usage_perc" in await metrics(client)


@pytest.mark.option("otlp-traces-endpoint", "collect-detailed-traces")
async def test_a_span_tells_of_its_request(client, collector):
    answer = await complete(client, "The capital of France is", 7)
    await client.service.close()
    [span] = collector.wait_for(lambda span: attributes(span)["gen_ai.request.id"] == answer["id"])
    found = attributes(span)
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 7
    times = {name.removeprefix("gen_ai.latency."): value for name, value in found.items() if "latency" in name}
    prefill, decode = times["time_in_model_prefill"], times["time_in_model_decode"]
    assert 0 < times["time_in_model_forward"] < times["time_in_model_execute"]
    assert times["time_in_queue"] + prefill + decode < times["e2e"]
    assert prefill < times["time_to_first_token"] < times["e2e"]


@pytest.mark.option("profiler-config")
async def test_a_profile_leaves_a_trace(client, profiles):
    assert (await client.http.post("/start_profile")).status_code == 200
    await complete(client, "Once", 4)
    assert not list(profiles.iterdir())
    assert (await client.http.post("/stop_profile")).status_code == 200
    [trace] = profiles.glob("*.pt.trace.json.gz")
    assert b"step of 1 tokens" in gzip.decompress(trace.read_bytes())
