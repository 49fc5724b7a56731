"""Metrics and traces of the real server."""

import gzip

import httpx
import pytest

from tests.collector import attributes, http_collector
from tests.launch import served
from tests.models import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.smollm2]


@pytest.fixture(scope="module")
def collector():
    with http_collector() as one:
        yield one


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(tmp_path_factory, collector, profiles):
    flags = (
        "--served-model-name", "demo", "--max-model-len", "512", "--num-gpu-blocks-override", "40",
        "--kv-cache-metrics", "--kv-cache-metrics-sample", "1", "--enable-mfu-metrics",
        "--show-hidden-metrics-for-version", "0.1",
        "--otlp-traces-endpoint", collector.url, "--collect-detailed-traces", "all",
        "--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir", str(profiles),
    )  # fmt: skip
    with served(smollm2_gguf(), *flags, folder=tmp_path_factory.mktemp("observed")) as one:
        yield one


def complete(server, prompt, max_tokens):
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()


@pytest.mark.option("kv-cache-metrics", "kv-cache-metrics-sample")
def test_blocks_of_repeated_prompts_are_measured(server):
    for turn in range(3):
        for start in range(3):
            complete(server, list(range(1000 * start + 100, 1000 * start + 400)), 2 + turn)
    for name in ("lifetime", "idle_before_evict", "reuse_gap"):
        assert server.metric(f"vllm:kv_block_{name}_seconds_count") > 0


@pytest.mark.option("enable-mfu-metrics")
def test_estimated_work_grows_with_the_tokens(server):
    def work():
        names = ("flops", "read_bytes", "write_bytes")
        return [server.metric(f"vllm:estimated_{name}_per_gpu_total") for name in names]

    def more(tokens):
        before = work()
        complete(server, "Once", tokens)
        return [now - then for now, then in zip(work(), before, strict=True)]

    few, many = more(20), more(40)
    assert all(1.5 * less < greater < 2.5 * less for less, greater in zip(few, many, strict=True))
    assert few[0] == pytest.approx(20 * 2 * 134.5e6, rel=0.05)  # two operations for each weight and token


@pytest.mark.option("show-hidden-metrics-for-version")
def test_a_hidden_name_is_shown(server):
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    assert "vllm:gpu_cache_usage_perc{" in text


@pytest.mark.option("otlp-traces-endpoint", "collect-detailed-traces")
def test_a_span_tells_of_its_request(server, collector):
    answer = complete(server, "The capital of France is", 7)
    [found] = collector.wait_for(lambda span: attributes(span)["gen_ai.request.id"] == answer["id"])
    found = attributes(found)
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 7
    times = {name.removeprefix("gen_ai.latency."): value for name, value in found.items() if "latency" in name}
    prefill, decode = times["time_in_model_prefill"], times["time_in_model_decode"]
    assert 0 < times["time_in_model_forward"] < times["time_in_model_execute"]
    assert times["time_in_queue"] + prefill + decode < times["e2e"]
    assert prefill < times["time_to_first_token"] < times["e2e"]


@pytest.mark.option("profiler-config")
def test_a_profile_leaves_a_trace(server, profiles):
    assert httpx.post(f"{server.url}/start_profile", timeout=60).status_code == 200
    complete(server, "Once", 4)
    assert not list(profiles.iterdir())
    assert httpx.post(f"{server.url}/stop_profile", timeout=60).status_code == 200
    [trace] = profiles.glob("*.pt.trace.json.gz")
    assert b"step of 1 tokens" in gzip.decompress(trace.read_bytes())
