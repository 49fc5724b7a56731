"""What the options of metrics and traces come to, and which of them have no effect."""

from collections.abc import Iterator

from rayllm.config.registry import Values


def kv_metrics_sample(values: Values) -> float:
    """Share of the KV blocks to measure; 0 where they are not."""
    return float(values["kv-cache-metrics-sample"]) if _measures_blocks(values) else 0.0


def observability_notes(values: Values) -> Iterator[str]:
    """Warnings about given options without effect."""
    if values["kv-cache-metrics"] and not _measures_blocks(values):
        yield "--kv-cache-metrics has no effect: --disable-log-stats turns the statistics off that it needs"
    if "kv-cache-metrics-sample" in values.given and not values["kv-cache-metrics"]:
        yield "--kv-cache-metrics-sample has no effect without --kv-cache-metrics"


def _measures_blocks(values: Values) -> bool:
    return bool(values["kv-cache-metrics"] and not values["disable-log-stats"])
