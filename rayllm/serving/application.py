"""Puts the deployments together: for `serve run` as one application, for `rayllm serve` as parts around its own HTTP.

ingress (HTTP app) ──► router      which engine
      │          └───► renderer    long prompts
      └══ sessions ══► engine ×N
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from rayllm.api.middleware import import_middleware
from rayllm.api.tool_servers import connect as connect_tools
from rayllm.config.environment import Environment, check_names
from rayllm.config.load import load
from rayllm.config.parallel import ParallelSettings, check_served
from rayllm.config.parser import parse_mapping
from rayllm.config.registry import registry
from rayllm.config.resolve import Resolved
from rayllm.config.serve import FrontendSettings, LogSettings
from rayllm.errors import ConfigError
from rayllm.logs import configure_logging
from rayllm.model.precheck import check_model
from rayllm.plugins import check_plugins
from rayllm.serving.autoscaling import KEY, EngineScaling
from rayllm.serving.engine_server import EngineServer
from rayllm.serving.renderer_server import RendererServer
from rayllm.serving.router import Router
from rayllm.serving.service import ServiceImpl
from rayllm.serving.wire import SessionLimits

log = logging.getLogger(__name__)

NODE_LABEL = "ray.io/node-id"
ENGINE_ROUTER = "rayllm.serving.request_router.EngineRequestRouter"
MANY = 100_000
"""Handle calls at once: the engine's own queue is what limits."""
STOP_S = 10.0
HEALTH_S = 2.0
HEALTH_TIMEOUT_S = 10.0
SERVE_ONLY = (
    "grpc",
    "host",
    "port",
    "uds",
    "uvicorn-log-level",
    "disable-uvicorn-access-log",
    "disable-access-log-for-endpoints",
    "ssl-keyfile",
    "ssl-certfile",
    "ssl-ca-certs",
    "ssl-cert-reqs",
    "ssl-ciphers",
    "enable-ssl-refresh",
    "h11-max-incomplete-event-size",
    "h11-max-header-count",
    "shutdown-timeout",
    "config",
    "data-parallel-address",
    "data-parallel-rpc-port",
    "enable-elastic-ep",
)
"""Options of `rayllm serve` that Serve's own configuration decides under `serve run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What all deployments need beside their own settings."""

    limits: SessionLimits
    logs: LogSettings
    resources: tuple[tuple[str, float], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    """What workers ask of Ray's nodes."""
    secret: str = field(default="", repr=False)
    """Of the nodes of one engine."""

    @classmethod
    def of(cls, environment: Environment, log_config: Mapping[str, Any] | None) -> "Runtime":
        """As the environment's variables and the log config say."""
        limits = SessionLimits(step_s=environment.step_limit_s, replica_wait_s=environment.replica_wait_s)
        return cls(
            limits=limits,
            logs=LogSettings(level=environment.logging_level, config=log_config),
            resources=environment.worker_resources,
            labels=environment.worker_labels,
            secret=environment.cluster_secret,
        )

    def place(self, parallel: ParallelSettings) -> ParallelSettings:
        """The settings of workers on Ray, which has them as actors where nothing else is asked for."""
        executor = parallel.executor or ("ray" if parallel.size > 1 else "uni")
        return replace(
            parallel, executor=executor, resources=self.resources, labels=self.labels, logs=self.logs,
            secret=self.secret,
        )  # fmt: skip


def engine_app(
    resolved: Resolved, runtime: Runtime, node: str | None = None, scaling: EngineScaling | None = None
) -> Application:
    """The engines alone, as an application whose handle takes `generate` and `stream`.

    `node` is the id of the one node that all of them, and their workers, must run on; None: any.
    """
    group, scaling = resolved.serve.data_parallel, scaling or EngineScaling()
    deployment = serve.deployment(
        name="engine",
        **scaling.replicas(resolved.engine, group.engines),
        # Without an option of Ray's own for it: everything must come up where Ray sees a single CPU.
        ray_actor_options={"num_cpus": 0, **({"label_selector": {NODE_LABEL: node}} if node is not None else {})},
        max_replicas_per_node=group.per_node,
        max_ongoing_requests=MANY,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=STOP_S,
        request_router_config=RequestRouterConfig(request_router_class=ENGINE_ROUTER),  # type: ignore[arg-type]
        # A model that cannot be loaded does not get better by trying again.
        max_constructor_retry_count=1,
    )(EngineServer)
    parallel = runtime.place(resolved.engine.parallel)
    if node is not None:
        parallel = replace(parallel, labels=(*parallel.labels, (NODE_LABEL, node)))
    engine = replace(resolved.engine, parallel=parallel)
    app: Application = deployment.bind(engine, resolved.serve.frontend, runtime.limits, runtime.logs)
    return app


def router_app(engines: Any, runtime: Runtime) -> Application:
    """The router over an engine deployment, given as its application or its handle."""
    app: Application = _helper("router")(Router).bind(engines, runtime.limits, runtime.logs)
    return app


def renderer_app(resolved: Resolved, runtime: Runtime) -> Application:
    """The renderer."""
    app: Application = _helper("renderer")(RendererServer).bind(resolved.serve.frontend, runtime.logs)
    return app


def build(args: Mapping[str, Any]) -> Application:
    """The whole service as one Serve application: what `serve run rayllm.serving.application:build` calls.

    `args` are the options of `rayllm serve` without dashes in front, as strings or YAML values. `deployment_config`
    beside them says how the engines are scaled; see `EngineScaling`.

    Raises:
        ConfigError, ModelError: an option or the model cannot be used.
    """
    environment = Environment.read(os.environ)
    scaling = EngineScaling.read(args.get(KEY))
    given = parse_mapping({name: value for name, value in args.items() if name != KEY}, registry())
    for name in SERVE_ONLY:
        if name in given:
            raise ConfigError(f"--{name}", "has no effect under serve run", "use Serve's own options")
    values = registry().values(given)
    unknown = check_names(os.environ, values["fail-on-environ-validation"])
    resolved = load(values, environment.api_key)
    if scaling.autoscaling is not None and resolved.serve.data_parallel.engines > 1:
        raise ConfigError(f"{KEY}.autoscaling_config", "contradicts --data-parallel-size", "leave one of them out")
    resolved = replace(resolved, engine=scaling.limited(resolved.engine))
    for note in (*unknown, *resolved.notes):
        log.warning(note)
    check_served(resolved.engine.parallel)
    check_model(resolved.engine)
    check_plugins(resolved.engine)
    for path in resolved.serve.frontend.middleware:
        import_middleware(path)
    connect_tools(resolved.serve.frontend.tool_servers)
    runtime = Runtime.of(environment, resolved.serve.log_config)
    # Serve, which has no node of its own, places engines as it likes where nothing else is asked for.
    here = given.get("data-parallel-backend") == "mp" and resolved.serve.data_parallel.engines > 1
    node = ray.get_runtime_context().get_node_id() if here else None
    engines = engine_app(resolved, runtime, node, scaling)
    ingress = serve.deployment(
        name="ingress",
        num_replicas=resolved.serve.http.servers,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MANY,
        health_check_period_s=HEALTH_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=STOP_S,
    )(serve.ingress()(Ingress))
    return ingress.bind(
        resolved.serve.frontend,
        runtime,
        engines,
        router_app(engines, runtime),
        renderer_app(resolved, runtime),
        resolved.serve.log_stats,
        resolved.serve.aggregate_stats,
        scaling.from_zero,
    )


class Ingress:
    """The HTTP app as a deployment. Serve's proxy passes it the requests."""

    async def __init__(  # type: ignore[misc]
        self,
        frontend: FrontendSettings,
        runtime: Runtime,
        engines: DeploymentHandle[Any],
        router: DeploymentHandle[Any],
        renderer: DeploymentHandle[Any],
        log_stats: bool,
        aggregate_stats: bool,
        from_zero: bool,
    ) -> None:
        configure_logging(runtime.logs)
        context = serve.get_replica_context()
        ingress_id = f"ingress-{context.replica_id.unique_id}"
        # Else replicas would give equal seeds to different requests.
        frontend = replace(frontend, seed=frontend.seed + (context.rank.rank << 64))
        self._app, self._service = build_frontend(frontend, ingress_id, runtime.limits)
        self._service.attach(engines, router, renderer, log_stats, aggregate_stats, from_zero)
        await self._service.wait_healthy()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return self._app

    async def __del__(self) -> None:
        """Called by Serve when it ends the replica."""
        if service := getattr(self, "_service", None):
            await service.close()


def build_frontend(frontend: FrontendSettings, ingress_id: str, limits: SessionLimits) -> tuple[FastAPI, ServiceImpl]:
    """The HTTP app and the service behind it, not yet attached to any engine."""
    from rayllm.api.app import build_app
    from rayllm.render.renderer import Renderer

    renderer = Renderer.load(frontend)
    name, tracing = frontend.served_model_names[0], None
    if frontend.traces is not None:
        from rayllm.serving.tracing import Tracing  # needs the extra otel

        tracing = Tracing(frontend.traces, name)
    service = ServiceImpl(
        renderer, name, ingress_id, limits, frontend.shown_metrics, tracing, render_workers=frontend.render_workers
    )
    app = build_app(service, frontend, renderer)
    if tracing is not None:
        app.add_middleware(tracing.middleware)
    return app, service


def _helper(name: str) -> Any:
    """A deployment of one replica that takes next to nothing and may be lost without harm."""
    return serve.deployment(
        name=name,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MANY,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=STOP_S,
    )
