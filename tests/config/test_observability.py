"""Options of metrics and traces: what they come to, and what is said or refused."""

import pytest

from rayllm.config.hidden_metrics import HIDDEN_METRICS, Renamed, hidden_since
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
