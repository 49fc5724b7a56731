"""How many engines Serve keeps, and how many requests each of them takes: `deployment_config` of an application."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pydantic
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from rayllm.config.engine import EngineConfig
from rayllm.errors import ConfigError

KEY = "deployment_config"
LOAD = "rayllm_requests"
"""The name under which engines report how many requests they have."""
POLICY = "rayllm.serving.autoscaling:by_load"


def by_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """An autoscaling policy of Serve: as many engines as their requests and those that wait for one need.

    Serve's own goes by the calls that it counts, and requests reach engines past these. An engine that has not reported
    yet counts as one that has a request.
    """
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    unheard = len(context.running_replicas) - len(loads)
    requests = sum(loads.values()) + unheard + context.total_queued_requests
    return round(requests / context.config.get_target_ongoing_requests(), 3), {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineScaling:
    """How the engine deployment is scaled. None: as the options of the command line say."""

    autoscaling: Mapping[str, Any] | None = None
    """Fields of Serve's AutoscalingConfig."""
    max_ongoing_requests: int | None = None
    """Requests that run in one engine."""
    max_queued_requests: int | None = None
    """Requests that wait in one engine; more are refused."""

    @classmethod
    def read(cls, given: Any) -> "EngineScaling":
        """From the `deployment_config` in an application's arguments; None: nothing was given.

        Raises:
            ConfigError: names the key.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ConfigError(KEY, "must be a mapping", "see apps/autoscaling.yaml")
        for key in given:
            if key not in ("autoscaling_config", "max_ongoing_requests", "max_queued_requests"):
                reason = "is not supported: rayllm takes autoscaling_config, max_ongoing_requests, max_queued_requests"
                raise ConfigError(f"{KEY}.{key}", reason, "leave it out, or set it under Serve's own deployments")
        autoscaling = given.get("autoscaling_config")
        unlimited = given.get("max_queued_requests") == -1  # as Serve has it
        return cls(
            autoscaling=None if autoscaling is None else _checked(autoscaling),
            max_ongoing_requests=_count(given, "max_ongoing_requests", 1),
            max_queued_requests=None if unlimited else _count(given, "max_queued_requests", 0),
        )

    @property
    def from_zero(self) -> bool:
        """Whether there may be no engine at all while nothing is asked."""
        return self.autoscaling is not None and AutoscalingConfig(**self.autoscaling).min_replicas == 0

    def limited(self, engine: EngineConfig) -> EngineConfig:
        """An engine's settings with these limits."""
        most, waiting = self.max_ongoing_requests, self.max_queued_requests
        return replace(
            engine,
            max_num_seqs=engine.max_num_seqs if most is None else min(most, engine.max_num_seqs),
            max_waiting=engine.max_waiting if waiting is None else waiting,
        )

    def replicas(self, engine: EngineConfig, engines: int) -> dict[str, Any]:
        """What Serve is told of the number of replicas. `engines` is that of the command line."""
        if self.autoscaling is None:
            return {"num_replicas": engines}
        usual = {"target_ongoing_requests": max(1, engine.max_num_seqs // 2), "policy": {"policy_function": POLICY}}
        return {"autoscaling_config": {**usual, **self.autoscaling}}


def _checked(given: Any) -> Mapping[str, Any]:
    place = f"{KEY}.autoscaling_config"
    if not isinstance(given, Mapping):
        raise ConfigError(place, "must be a mapping", "see apps/autoscaling.yaml")
    for key in given:
        if key not in AutoscalingConfig.model_fields:
            known = ", ".join(AutoscalingConfig.model_fields)
            raise ConfigError(f"{place}.{key}", f"is no field of Serve's AutoscalingConfig, which has {known}")
    try:
        AutoscalingConfig(**given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(".".join([place, *map(str, first["loc"])]), first["msg"]) from None
    except (TypeError, ValueError, ImportError, AttributeError) as error:  # of a policy that cannot be imported
        raise ConfigError(place, str(error)) from None
    return given


def _count(given: Mapping[str, Any], key: str, least: int) -> int | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{KEY}.{key}", f"must be a whole number from {least} on, not {value!r:.40}")
    return value
