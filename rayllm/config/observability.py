"""What the options of metrics and traces come to, and which of them have no effect."""

from collections.abc import Iterator

from rayllm.config.hidden_metrics import HIDDEN_METRICS, hidden_since
from rayllm.config.registry import Values


def kv_metrics_sample(values: Values) -> float:
    """Share of the KV blocks to measure; 0 where they are not."""
    return float(values["kv-cache-metrics-sample"]) if _measures_blocks(values) else 0.0


def shown_metrics(values: Values) -> dict[str, str]:
    """Older names of metrics to show, each with what it is called now."""
    version = values["show-hidden-metrics-for-version"]
    return {} if version is None else hidden_since(version)


def observability_notes(values: Values) -> Iterator[str]:
    """Warnings about given options without effect."""
    if values["kv-cache-metrics"] and not _measures_blocks(values):
        yield "--kv-cache-metrics has no effect: --disable-log-stats turns the statistics off that it needs"
    if "kv-cache-metrics-sample" in values.given and not values["kv-cache-metrics"]:
        yield "--kv-cache-metrics-sample has no effect without --kv-cache-metrics"
    if (version := values["show-hidden-metrics-for-version"]) is not None and not shown_metrics(values):
        versions = sorted({one.hidden_since for one in HIDDEN_METRICS.values()})
        yield (
            f"--show-hidden-metrics-for-version has no effect: {version} and later versions hid no metric of "
            f"rayllm's; those that did: {', '.join(versions)}"
        )


def _measures_blocks(values: Values) -> bool:
    return bool(values["kv-cache-metrics"] and not values["disable-log-stats"])
