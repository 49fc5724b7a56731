"""What `serve run` is told, and what Serve is told of the engines."""

import dataclasses

import pytest

from rayllm.config.serve import LogSettings
from rayllm.errors import ConfigError
from rayllm.serving.application import Runtime, build, engine_app
from rayllm.serving.launch import app_name, has_router
from rayllm.serving.wire import SessionLimits
from tests.config.test_resolve import resolved
from tests.models import smollm2_gguf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 1),
        ("ssl-certfile", "x"),
        ("enable-ssl-refresh", True),
        ("disable-access-log-for-endpoints", "/health"),
        ("h11-max-header-count", 10),
        ("data-parallel-address", "127.0.0.1"),
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


def deployment(*flags, node=None):
    runtime = Runtime(limits=SessionLimits(), logs=LogSettings())
    return engine_app(resolved(*flags), runtime, node)._bound_deployment


@pytest.mark.option("data-parallel-backend", "data-parallel-size-local")
def test_where_engines_run():
    anywhere = deployment("-dp", "2")
    assert (anywhere.num_replicas, anywhere._replica_config.max_replicas_per_node) == (2, None)
    assert "label_selector" not in anywhere.ray_actor_options
    here = deployment("-dp", "2", node="abc")
    assert here.ray_actor_options["label_selector"] == {"ray.io/node-id": "abc"}
    assert here.init_args[0].parallel.labels == (("ray.io/node-id", "abc"),)  # of the engines' workers
    assert anywhere.init_args[0].parallel.labels == ()
    spread = deployment("-dp", "4", "-dpb", "ray", "-dpl", "2")
    assert (spread.num_replicas, spread._replica_config.max_replicas_per_node) == (4, 2)


@pytest.mark.option("data-parallel-external-lb", "data-parallel-hybrid-lb")
def test_a_server_has_the_engines_of_its_own_ranks_only():
    assert deployment("-dp", "4", "-dpn", "1").num_replicas == 1
    assert deployment("-dp", "4", "-dpl", "2", "-dpr", "2").num_replicas == 2
    groups = [resolved(*flags.split()).serve.data_parallel for flags in (
        "-dp 2", "-dp 3 -dpn 0", "-dp 3 -dpn 2", "-dp 3 -dph -dpl 2",
    )]  # fmt: skip
    # Servers on one cluster must not take each other's names.
    assert [app_name("rayllm", group) for group in groups] == ["rayllm", "rayllm-0", "rayllm-2", "rayllm-0"]
    assert [has_router(group) for group in groups] == [True, False, False, True]
    assert has_router(dataclasses.replace(groups[1], elastic=True))
