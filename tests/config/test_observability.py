"""Options of metrics and traces: what they come to, and what is said or refused."""

import os

import pytest

from rayllm.config.engine import ProfilerSettings
from rayllm.config.hidden_metrics import HIDDEN_METRICS, Renamed, hidden_since
from rayllm.config.observability import check_trace_packages
from rayllm.config.serve import TraceSettings
from rayllm.errors import ConfigError

from .test_resolve import resolved


@pytest.mark.option("kv-cache-metrics", "kv-cache-metrics-sample")
def test_kv_cache_metrics():
    assert resolved().engine.kv_metrics_sample == 0
    assert resolved("--kv-cache-metrics").engine.kv_metrics_sample == 0.01
    assert resolved("--kv-cache-metrics", "--kv-cache-metrics-sample", "1").engine.kv_metrics_sample == 1.0
    quiet = resolved("--kv-cache-metrics", "--disable-log-stats")
    assert quiet.engine.kv_metrics_sample == 0
    assert "--kv-cache-metrics has no effect" in quiet.notes[0]
    alone = resolved("--kv-cache-metrics-sample", "0.5")
    assert alone.engine.kv_metrics_sample == 0
    assert "--kv-cache-metrics-sample has no effect" in alone.notes[0]


@pytest.mark.option("kv-cache-metrics-sample")
@pytest.mark.parametrize("share", ["0", "1.5", "-0.1"])
def test_a_share_outside_its_limits_is_refused(share):
    with pytest.raises(ConfigError, match="--kv-cache-metrics-sample"):
        resolved("--kv-cache-metrics", "--kv-cache-metrics-sample", share)


@pytest.mark.option("show-hidden-metrics-for-version")
def test_hidden_metrics():
    assert resolved().serve.frontend.shown_metrics == {}
    shown = resolved("--show-hidden-metrics-for-version", "0.1")
    assert shown.serve.frontend.shown_metrics == {old: one.successor for old, one in HIDDEN_METRICS.items()}
    assert shown.notes == ()
    late = resolved("--show-hidden-metrics-for-version", "9.0")
    assert late.serve.frontend.shown_metrics == {}
    assert "--show-hidden-metrics-for-version has no effect" in late.notes[0]
    with pytest.raises(ConfigError, match="--show-hidden-metrics-for-version"):
        resolved("--show-hidden-metrics-for-version", "new")


def test_versions_are_compared_as_numbers():
    metrics = {"a": Renamed("x", "0.9.0"), "b": Renamed("y", "0.10.0"), "c": Renamed("z", "1.0.0")}
    assert hidden_since("0.10", metrics) == {"b": "y", "c": "z"}
    assert hidden_since("v0.10.1", metrics) == {"c": "z"}
    assert hidden_since("0.9", metrics) == {"a": "x", "b": "y", "c": "z"}


@pytest.mark.option("otlp-traces-endpoint")
@pytest.mark.parametrize(
    ("url", "endpoint", "protocol"),
    [
        ("http://host:4318", "http://host:4318/v1/traces", "http"),
        ("https://host/", "https://host/v1/traces", "http"),
        ("http://host:9/own/path", "http://host:9/own/path", "http"),
        ("grpc://host:9", "http://host:9", "grpc"),
        ("grpcs://host:9", "https://host:9", "grpc"),
        ("http://host:4317", "http://host:4317", "grpc"),
    ],
)
def test_where_traces_go(url, endpoint, protocol):
    traces = resolved("--otlp-traces-endpoint", url).serve.frontend.traces
    assert traces == TraceSettings(endpoint=endpoint, protocol=protocol)


@pytest.mark.option("otlp-traces-endpoint")
@pytest.mark.parametrize("url", ["host:4317", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_collector_is_refused(url):
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        resolved("--otlp-traces-endpoint", url)


@pytest.mark.option("collect-detailed-traces")
def test_details_need_a_collector():
    collector = ["--otlp-traces-endpoint", "http://host"]
    for parts, model, worker in [("model", True, False), ("worker", False, True), ("all", True, True)]:
        traces = resolved(*collector, "--collect-detailed-traces", parts).serve.frontend.traces
        assert (traces.model, traces.worker) == (model, worker)
    assert resolved("--collect-detailed-traces", "None").serve.frontend.traces is None
    with pytest.raises(ConfigError, match=r"--collect-detailed-traces: .*--otlp-traces-endpoint"):
        resolved("--collect-detailed-traces", "all")


@pytest.mark.option("otlp-traces-endpoint")
def test_a_missing_package_is_named(monkeypatch):
    check_trace_packages(None)
    for protocol in ("http", "grpc"):
        settings = TraceSettings(endpoint="http://host", protocol=protocol)
        check_trace_packages(settings)
        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name: None)
            with pytest.raises(ConfigError, match=f"opentelemetry-exporter-otlp-proto-{protocol}.*rayllm.otel"):
                check_trace_packages(settings)


@pytest.mark.option("profiler-config")
def test_a_profiler():
    off = resolved()
    assert off.engine.profiler is None
    assert not off.serve.frontend.profiling
    arguments = ["--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "traces", "max_iterations": 3}']
    on = resolved(*arguments)
    assert on.engine.profiler == ProfilerSettings(folder=os.path.abspath("traces"), max_iterations=3)
    assert on.serve.frontend.profiling
    assert "engines only" in on.notes[0]
    assert resolved(*arguments, "--profiler-config.ignore_frontend", "true").notes == ()
    assert "has no effect" in resolved("--profiler-config.torch_profiler_dir", "traces").notes[0]


@pytest.mark.option("profiler-config")
@pytest.mark.parametrize(
    ("key", "value"),
    [("profiler", "cuda"), ("torch_profiler_dir", ""), ("delay_iterations", "-1"), ("active_iterations", "0")],
)
def test_what_a_profiler_cannot_do_is_refused(key, value):
    sound = ["--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir", "traces"]
    with pytest.raises(ConfigError, match=f"--profiler-config.{key}"):
        resolved(*sound, f"--profiler-config.{key}", value)
