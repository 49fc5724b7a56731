"""Each request that goes to engines becomes one span at a collector, within the client's trace if it has one."""

import time

import pytest
from msgspec.structs import replace

from rayllm.api.fake import Script
from rayllm.config.observability import trace_settings
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.errors import Overloaded
from rayllm.messages.ingress import RequestTimes
from rayllm.serving.tracing import Tracing
from tests.collector import attributes, grpc_collector, http_collector

from ..api.conftest import MODEL, Harness

LATENCY = "gen_ai.latency."
TIMES = RequestTimes(queued=1.0, prefill=2.0, decode=3.0, model=4.0, worker=5.0)


class TimedStream:
    """A stream whose last output tells the engine's times."""

    def __init__(self, stream):
        self._stream = stream
        self.abort = stream.abort

    async def __aiter__(self):
        async for output in self._stream:
            yield output if output.finish_reason is None else replace(output, times=TIMES)


class Traced(Harness):
    """The HTTP app as `build_frontend` puts it together with tracing."""

    def __init__(self, url, *arguments):
        super().__init__()
        values = parse_arguments(["/m", "--otlp-traces-endpoint", url, *arguments], registry())
        self.tracing = Tracing(trace_settings(values), MODEL)
        self.tracing.start()
        self.app.add_middleware(self.tracing.middleware)
        submit = self.service.submit

        async def timed(adds):
            return [TimedStream(stream) for stream in await submit(adds)]

        self.service.submit = lambda adds: self.tracing.submit(adds, timed)

    def close(self):
        self.tracing._provider.shutdown()


@pytest.fixture(scope="module")
def collector():
    with http_collector() as one:
        yield one


@pytest.fixture
async def traced(collector):
    made = []

    def make(*arguments):
        made.append(Traced(collector.url, *arguments))
        return made[-1]

    collector.spans.clear()
    yield make
    for one in made:
        one.close()


@pytest.mark.option("otlp-traces-endpoint")
async def test_a_request_is_a_span(traced, collector):
    api = traced()
    reply = (await api.chat(max_tokens=3, temperature=0.5)).json()
    await api.request("GET", "/health")
    await api.request("GET", "/metrics")
    await api.tracing.flush()
    [span] = collector.wait(1)
    found = attributes(span)
    assert collector.services == {"rayllm"}
    assert span.name == f"chat {MODEL}"
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.id"] == reply["id"]
    assert found["gen_ai.request.max_tokens"] == 3
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < found[f"{LATENCY}time_to_first_token"] <= found[f"{LATENCY}e2e"]
    assert found[f"{LATENCY}time_in_queue"] == 1.0
    assert span.end_time_unix_nano > span.start_time_unix_nano
    assert not span.parent_span_id
    assert not any("time_in_model" in name for name in found)


@pytest.mark.option("otlp-traces-endpoint")
@pytest.mark.parametrize("stream", [True, False])
async def test_the_client_s_trace_goes_on(traced, collector, stream):
    api = traced()
    headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "a=b"}
    body = {"model": MODEL, "prompt": ["hi", "there"], "n": 2, "stream": stream, "max_tokens": 2}
    await api.request("POST", "/v1/completions", json=body, headers=headers)
    unsampled = headers | {"traceparent": f"00-{'ef' * 16}-{'cd' * 8}-00"}
    await api.request("POST", "/v1/completions", json=body, headers=unsampled)
    await api.tracing.flush()
    [span] = collector.wait(1)
    assert span.trace_id.hex() == "ab" * 16
    assert span.parent_span_id.hex() == "cd" * 8
    assert span.trace_state == "a=b"
    found = attributes(span)
    assert span.name == f"text_completion {MODEL}"
    assert found["gen_ai.request.choice.count"] == 2
    assert found["gen_ai.usage.input_tokens"] == len(api.ids("hi")) + len(api.ids("there"))
    assert found["gen_ai.usage.output_tokens"] == 8
    assert found["gen_ai.response.finish_reasons"] == ["length"] * 4


@pytest.mark.option("collect-detailed-traces")
@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ("all", {"time_in_model_forward": 4.0, "time_in_model_execute": 5.0}),
        ("model", {"time_in_model_forward": 4.0}),
        ("worker", {"time_in_model_execute": 5.0}),
    ],
)
async def test_details_are_the_engine_s_times(traced, collector, parts, names):
    api = traced("--collect-detailed-traces", parts)
    await api.complete()
    await api.tracing.flush()
    [span] = collector.wait(1)
    found = {name.removeprefix(LATENCY): value for name, value in attributes(span).items() if "time_in" in name}
    assert found == {"time_in_queue": 1.0, "time_in_model_prefill": 2.0, "time_in_model_decode": 3.0, **names}


async def test_a_collector_that_is_gone_delays_nothing_for_long(monkeypatch):
    monkeypatch.setattr("rayllm.serving.tracing.FLUSH_S", 0.2)
    with http_collector() as gone:
        url = gone.url
    api = Traced(url)
    assert (await api.complete()).status_code == 200
    began = time.monotonic()
    await api.tracing.flush()
    assert time.monotonic() - began < 3  # where the exporter tries for ten


async def test_failures_and_stops_show(traced, collector):
    api = traced()
    api.service.refusal = Overloaded("full")
    assert (await api.complete()).status_code == 503
    api.service.refusal = None
    api.scripts(Script([[65]], finish_reason="error"))
    assert (await api.complete()).status_code == 500
    api.script("one", "two", "three", hang=True)
    await api.complete(stop=["two"])
    await api.tracing.flush()
    refused, failed, stopped = map(attributes, collector.wait(3))
    assert refused["error.type"] == "Overloaded"
    assert collector.spans[0].status.message == "full"
    assert failed["error.type"] == "error"
    assert "error.type" not in stopped
    assert stopped["gen_ai.response.finish_reasons"] == ["stop"]


@pytest.mark.option("otlp-traces-endpoint")
async def test_collectors_may_speak_grpc():
    with grpc_collector() as collector:
        api = Traced(collector.url)
        await api.complete(max_tokens=2)
        await api.tracing.flush()
        [span] = collector.wait(1)
        assert attributes(span)["gen_ai.usage.output_tokens"] == 2
        api.close()
