"""Prometheus text for the whole service, under the metric names that dashboards for vLLM read."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rayllm.messages.ingress import EngineStats, Histogram

PREFIX = "vllm:"
LABELS = ("model_name", "engine")
HISTOGRAM_HELP = {
    "time_to_first_token_seconds": "Time from a request's arrival to its first token.",
    "inter_token_latency_seconds": "Time between two tokens of a request.",
    "e2e_request_latency_seconds": "Time from a request's arrival to its end.",
    "request_queue_time_seconds": "Time that a request waited for its first step.",
    "request_prompt_tokens": "Prompt tokens of a finished request.",
    "request_generation_tokens": "Output tokens of a finished request.",
    "kv_block_lifetime_seconds": "Time from when a KV block is taken to when its content is given up (sampled).",
    "kv_block_idle_before_evict_seconds": "Time that a KV block lies unused before its content is given up (sampled).",
    "kv_block_reuse_gap_seconds": "Time between two uses of the content of a KV block (sampled).",
}
ESTIMATE_HELP = {
    "estimated_flops_per_gpu": "Estimated floating-point operations of each worker.",
    "estimated_read_bytes_per_gpu": "Estimated bytes of weights and KV cache that each worker read.",
    "estimated_write_bytes_per_gpu": "Estimated bytes of KV cache that each worker wrote.",
}


def prometheus_text(stats: Mapping[str, EngineStats], model_name: str, shown: Mapping[str, str] = {}) -> bytes:
    """The metrics of all engines, given by engine id and labelled by rank, and of this process.

    `shown` are older names, each with that of a metric, under which this is shown as well.
    """
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_Engines(_labelled(stats), model_name, shown))
    return generate_latest(registry)


def _labelled(stats: Mapping[str, EngineStats]) -> dict[str, EngineStats]:
    """The stats by rank, which dashboards know engines by.

    While an engine is replaced, two may have one rank; samples must differ in a label, so that the second one's has its
    id as well.
    """
    labelled: dict[str, EngineStats] = {}
    for engine_id, one in sorted(stats.items(), key=lambda item: item[1].rank):
        rank = str(one.rank)
        labelled[rank if rank not in labelled else f"{rank} ({engine_id})"] = one
    return labelled


_Value = Callable[[EngineStats], float]


class _Engines(Collector):
    """One moment of all engines."""

    def __init__(self, stats: Mapping[str, EngineStats], model_name: str, shown: Mapping[str, str]) -> None:
        self._stats = stats
        self._model_name = model_name
        self._shown = shown

    def collect(self) -> Iterable[Metric]:
        """Called once by the registry."""
        for family in self._families():
            yield family
            for old, new in self._shown.items():
                if family.name == PREFIX + new:
                    yield _renamed(family, PREFIX + old)

    def _families(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield self._finished()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests in the running batch.", lambda s: s.load.running)
        yield self._gauge("num_requests_waiting", "Requests that wait to run.", lambda s: s.load.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda s: s.load.kv_usage)
        yield self._gauge("kv_cache_blocks", "KV blocks.", lambda s: s.blocks_total)
        yield self._gauge("kv_cache_blocks_free", "KV blocks that are free or cached.", lambda s: s.blocks_free)

    def _counters(self) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "Prompt tokens processed.", lambda s: s.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens)
        yield self._counter("num_requests_rejected", "Requests refused: too many ran or waited.", lambda s: s.rejected)
        yield self._counter("num_preemptions", "Preemptions.", lambda s: s.preemptions)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found cached.", lambda s: s.prefix_hits)
        yield self._counter("cascade_steps", "Steps with cascade attention.", lambda s: s.cascade_steps)
        for name, text in ESTIMATE_HELP.items():
            if any(name in stats.estimates for stats in self._stats.values()):
                yield self._counter(name, text, lambda s, name=name: s.estimates.get(name, 0.0))

    def _gauge(self, name: str, text: str, value: _Value) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
        for engine, stats in self._stats.items():
            family.add_metric((self._model_name, engine), value(stats))
        return family

    def _counter(self, name: str, text: str, value: _Value) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        for engine, stats in self._stats.items():
            family.add_metric((self._model_name, engine), value(stats))
        return family

    def _finished(self) -> Metric:
        labels = (*LABELS, "finished_reason")
        family = CounterMetricFamily(PREFIX + "request_success", "Requests that ended, by reason.", labels=labels)
        for engine, stats in self._stats.items():
            for reason, count in stats.finished.items():
                family.add_metric((self._model_name, engine, reason), count)
        return family

    def _histograms(self) -> Iterator[Metric]:
        names = dict.fromkeys(name for stats in self._stats.values() for name in stats.histograms)
        for name in names:
            text = HISTOGRAM_HELP.get(name, name.replace("_", " "))
            family = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
            for engine, stats in self._stats.items():
                if name in stats.histograms:
                    histogram = stats.histograms[name]
                    family.add_metric((self._model_name, engine), _cumulative(histogram), histogram.sum)
            yield family


def _renamed(family: Metric, name: str) -> Metric:
    copy = Metric(name, f"Older name of {family.name}.", family.type)
    copy.samples = [sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples]
    return copy


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip([*map(float, histogram.bounds), float("inf")], histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
    return buckets
