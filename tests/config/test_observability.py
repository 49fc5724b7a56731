"""Options of metrics and traces: what they come to, and what is said or refused."""

import pytest

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
