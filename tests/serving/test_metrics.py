"""The Prometheus text carries every engine's numbers under the names that dashboards read."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayllm.config.hidden_metrics import HIDDEN_METRICS
from rayllm.messages.ingress import EngineStats, Histogram, Load
from rayllm.serving.metrics import prometheus_text


def samples(stats, **kwargs):
    text = prometheus_text(stats, "demo", **kwargs).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_engine_has_its_samples():
    stats = {
        "a": EngineStats(load=Load(running=2, waiting=3, kv_usage=0.25), prompt_tokens=10, finished={"stop": 4}),
        "b": EngineStats(rank=1, prefix_queries=8, prefix_hits=6, preemptions=1, cascade_steps=5, rejected=7),
    }
    found = samples(stats)
    a, b, model = ("engine", "0"), ("engine", "1"), ("model_name", "demo")
    assert found["vllm:num_requests_running", a, model] == 2
    assert found["vllm:num_requests_waiting", a, model] == 3
    assert found["vllm:kv_cache_usage_perc", a, model] == 0.25
    assert found["vllm:prompt_tokens_total", a, model] == 10
    assert found["vllm:generation_tokens_total", b, model] == 0
    assert found["vllm:num_preemptions_total", b, model] == 1
    assert found["vllm:num_requests_rejected_total", b, model] == 7
    assert found["vllm:cascade_steps_total", a, model] == 0
    assert found["vllm:cascade_steps_total", b, model] == 5
    assert found["vllm:prefix_cache_queries_total", b, model] == 8
    assert found["vllm:prefix_cache_hits_total", b, model] == 6
    assert found["vllm:request_success_total", a, ("finished_reason", "stop"), model] == 4
    assert any(name[0] == "process_resident_memory_bytes" for name in found)


def test_engines_are_known_by_their_rank():
    def labels(**ranks):
        found = samples({engine: EngineStats(rank=rank) for engine, rank in ranks.items()})
        return {dict(key[1:])["engine"] for key in found if key[0] == "vllm:num_requests_running"}

    assert labels(x=3, y=2) == {"2", "3"}
    assert labels(old=1, y=0, new=1) == {"0", "1", "1 (new)"}  # while one is replaced


def test_histograms_are_cumulative():
    histogram = Histogram([0.1, 1.0], [3, 2, 1], 4.5)
    found = samples({"a": EngineStats(histograms={"time_to_first_token_seconds": histogram})})
    name, a, model = "vllm:time_to_first_token_seconds", ("engine", "0"), ("model_name", "demo")
    assert found[f"{name}_bucket", a, ("le", "0.1"), model] == 3
    assert found[f"{name}_bucket", a, ("le", "1.0"), model] == 5
    assert found[f"{name}_bucket", a, ("le", "+Inf"), model] == 6
    assert found[f"{name}_count", a, model] == 6
    assert found[f"{name}_sum", a, model] == 4.5


def test_without_engines_there_is_still_a_text():
    assert b"process_" in prometheus_text({}, "demo")


@pytest.mark.option("show-hidden-metrics-for-version")
def test_hidden_names_show_only_when_asked_for():
    histogram = Histogram([0.1], [3, 2], 4.5)
    histograms = {"inter_token_latency_seconds": histogram}
    stats = {"a": EngineStats(load=Load(kv_usage=0.5), prefix_hits=6, histograms=histograms)}
    plain = samples(stats)
    assert not any(old in name for name, *_ in plain for old in HIDDEN_METRICS)
    shown = samples(stats, shown={old: one.successor for old, one in HIDDEN_METRICS.items()})
    assert plain.keys() <= shown.keys()
    a, model = ("engine", "0"), ("model_name", "demo")
    assert shown["vllm:gpu_cache_usage_perc", a, model] == 0.5
    assert shown["vllm:gpu_prefix_cache_hits_total", a, model] == 6
    assert shown["vllm:gpu_prefix_cache_queries_total", a, model] == 0
    assert shown["vllm:time_per_output_token_seconds_bucket", a, ("le", "0.1"), model] == 3
    assert shown["vllm:time_per_output_token_seconds_count", a, model] == 5
