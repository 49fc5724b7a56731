"""What `serve run` is told."""

import pytest

from rayllm.errors import ConfigError
from rayllm.serving.application import build
from tests.models import smollm2_gguf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 1),
        ("ssl-certfile", "x"),
        ("enable-ssl-refresh", True),
        ("disable-access-log-for-endpoints", "/health"),
        ("h11-max-header-count", 10),
    ],
)
def test_what_serves_own_proxy_decides_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"--{name}: has no effect under serve run"):
        build({"model": "m", name: value})


@pytest.mark.smollm2
def test_engines_are_counted_by_one_option_only():
    args = {"model": str(smollm2_gguf()), "data-parallel-size": 2, "deployment_config": {"autoscaling_config": {}}}
    with pytest.raises(ConfigError, match=r"deployment_config.autoscaling_config: contradicts --data-parallel-size"):
        build(args)
