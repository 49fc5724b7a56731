"""How many engines Serve is to keep, and what they take."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig

from rayllm.errors import ConfigError
from rayllm.serving.autoscaling import LOAD, POLICY, EngineScaling, by_load


def wanted(*loads, queued=0.0, running=None, target=4.0):
    context = SimpleNamespace(
        aggregated_metrics={LOAD: dict(enumerate(loads)), "running_requests": {0: 99.0}} if loads else {},
        running_replicas=range(len(loads) if running is None else running),
        total_queued_requests=queued,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: target),
    )
    return by_load(context)[0]


def test_engines_follow_their_requests():
    assert wanted() == 0
    assert wanted(0.0, 0.0) == 0
    assert wanted(4.0, 4.0) == 2
    assert wanted(9.0) == 2.25
    assert wanted(2.0000000004, 2.0) == 1  # means of samples are not exact
    assert 0 < wanted(queued=1.0) <= 1
    assert 0 < wanted(running=1) <= 1  # it has not reported yet


@dataclass(frozen=True)
class Engine:
    max_num_seqs: int = 64
    max_waiting: int = 4096


def test_limits_of_engines():
    assert EngineScaling.read(None).limited(Engine()) == Engine()
    scaling = EngineScaling.read({"max_ongoing_requests": 1, "max_queued_requests": 0})
    assert scaling.limited(Engine()) == Engine(1, 0)
    assert EngineScaling.read({"max_ongoing_requests": 100}).limited(Engine()) == Engine(64)
    assert EngineScaling.read({"max_queued_requests": -1}).limited(Engine()) == Engine()


def test_what_serve_is_told():
    assert EngineScaling.read({}).replicas(Engine(), 3) == {"num_replicas": 3}
    given = {"min_replicas": 0, "max_replicas": 2}
    scaling = EngineScaling.read({"autoscaling_config": given})
    config = AutoscalingConfig(**scaling.replicas(Engine(), 1)["autoscaling_config"])
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (0, 2, 32)
    assert config.policy.get_policy().__name__ == "by_load"
    own = {**given, "min_replicas": 1, "target_ongoing_requests": 3, "policy": {"policy_function": POLICY}}
    (told,) = EngineScaling.read({"autoscaling_config": own}).replicas(Engine(), 1).values()
    assert told == own
    assert scaling.from_zero
    assert not EngineScaling.read({"autoscaling_config": own}).from_zero
    assert not EngineScaling.read({"autoscaling_config": {}}).from_zero


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("fast", "deployment_config: "),
        ({"num_gpus": 1}, "deployment_config.num_gpus: "),
        ({"max_ongoing_requests": 0}, "deployment_config.max_ongoing_requests: "),
        ({"max_queued_requests": "1"}, "deployment_config.max_queued_requests: "),
        ({"max_queued_requests": True}, "deployment_config.max_queued_requests: "),
        ({"max_queued_requests": -2}, "deployment_config.max_queued_requests: "),
        ({"autoscaling_config": 2}, "deployment_config.autoscaling_config: "),
        ({"autoscaling_config": {"min_replica": 0}}, "deployment_config.autoscaling_config.min_replica: "),
        ({"autoscaling_config": {"max_replicas": 0}}, "deployment_config.autoscaling_config.max_replicas: "),
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}, "deployment_config.autoscaling_config: "),
        ({"autoscaling_config": {"policy": {"policy_function": "no.such:policy"}}}, "deployment_config.autosc"),
    ],
)
def test_what_is_wrong_is_named(given, place):
    with pytest.raises(ConfigError) as caught:
        EngineScaling.read(given)
    assert str(caught.value).startswith(place)
