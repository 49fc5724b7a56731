"""Older names of metrics: when each was hidden from /metrics, and what it is called now."""

from collections.abc import Mapping
from dataclasses import dataclass

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Renamed:
    """An older name of a metric."""

    successor: str
    hidden_since: str
    """The version of rayllm."""


HIDDEN_METRICS: Mapping[str, Renamed] = {
    "gpu_cache_usage_perc": Renamed("kv_cache_usage_perc", "0.1.0"),
    "gpu_prefix_cache_queries": Renamed("prefix_cache_queries", "0.1.0"),
    "gpu_prefix_cache_hits": Renamed("prefix_cache_hits", "0.1.0"),
    "time_per_output_token_seconds": Renamed("inter_token_latency_seconds", "0.1.0"),
}
"""By older name, without prefix. One that is to go is first hidden here, and removed in a later version."""


def parse_version(text: str) -> Version:
    """`0.7` and `v0.7.0` as (0, 7, 0).

    Raises:
        ValueError: it is no version.
    """
    parts = [int(part) for part in text.removeprefix("v").split(".")]
    if not 1 <= len(parts) <= 3 or min(parts) < 0:
        raise ValueError(text)
    return tuple(parts + [0] * (3 - len(parts)))


def hidden_since(version: str, metrics: Mapping[str, Renamed] = HIDDEN_METRICS) -> dict[str, str]:
    """The names hidden by this version or a later one, each with what it is called now."""
    wanted = parse_version(version)
    return {old: one.successor for old, one in metrics.items() if parse_version(one.hidden_since) >= wanted}
