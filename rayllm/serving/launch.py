"""`rayllm serve`: HTTP or gRPC in this process, everything else on Ray. Starts, watches and ends it all."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import uvloop

from rayllm.api.middleware import import_middleware
from rayllm.api.tool_servers import connect as connect_tools
from rayllm.config.data_parallel import DataParallel
from rayllm.config.environment import Environment
from rayllm.config.parallel import check_served
from rayllm.config.resolve import Resolved
from rayllm.config.serve import HttpSettings, ServeSettings, TlsSettings
from rayllm.errors import RayLLMError
from rayllm.messages.group import Join
from rayllm.model.precheck import check_model
from rayllm.plugins import check_plugins
from rayllm.render.renderer import Renderer
from rayllm.serving.coordinator import GroupMember, GroupServer
from rayllm.serving.processes import descendants, end
from rayllm.serving.ray_cluster import Cluster
from rayllm.serving.server import Server, listen, make_server, place_of
from rayllm.serving.tls import make_context

if TYPE_CHECKING:
    from rayllm.serving.api_process import ApiProcesses
    from rayllm.serving.service import ServiceImpl

log = logging.getLogger(__name__)

ENGINE_APP = "rayllm"
ROUTER_APP = "rayllm-router"
RENDERER_APP = "rayllm-renderer"
INTERRUPTED = 130
STOP_S = 2.0
GRACE_S = 0.5


def serve_model(resolved: Resolved, environment: Environment, variables: MutableMapping[str, str]) -> int:
    """Serve until SIGINT or SIGTERM; the exit status of the process.

    Raises:
        ConfigError: the place to listen at is taken, the files for TLS, the middleware or the chat template cannot be
            used, a tool server does not answer, gRPC is not installed, the servers of a data-parallel group do not
            meet, or the Ray cluster cannot be joined.
        ModelError: the model is of no known family, or damaged.
        RayLLMError: an engine could not start.
    """
    began = time.monotonic()
    check_served(resolved.engine.parallel)
    check_model(resolved.engine)
    check_plugins(resolved.engine)
    if resolved.serve.http.tls is not None:
        make_context(resolved.serve.http.tls)
    frontend = resolved.serve.frontend
    for path in frontend.middleware:
        import_middleware(path)
    connect_tools(frontend.tool_servers)
    if frontend.chat_template is not None or frontend.chat_template_name or frontend.chat_template_kwargs:
        Renderer.load(frontend)  # the HTTP process will do it again, but then Ray is half started
    if resolved.serve.http.grpc:
        # gRPC would stop its threads for each process that Ray starts, all of which run other programs.
        variables.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    listener = listen(resolved.serve.http)
    address = variables.get("RAY_ADDRESS") or None
    cluster = Cluster(address, variables)
    launch = _Launch(resolved, environment, cluster, listener, began)
    return run_in_loop(launch.run())


def run_in_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine in a fresh uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def catch_signals(stop: asyncio.Event, numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> None:
    """Have signals set the event, and end the process at once where it is set already.

    To be called again after `ray.init`, whose own handler prints a trace.
    """

    def caught() -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()

    for number in numbers:
        asyncio.get_running_loop().remove_signal_handler(number)
        asyncio.get_running_loop().add_signal_handler(number, caught)


async def end_server(server: Server, service: "ServiceImpl", settings: HttpSettings) -> None:
    """End a server: what runs may finish within the shutdown timeout, or is cut at once where that is 0."""
    if settings.shutdown_timeout_s == 0:
        await service.close()
    await server.stop()
    await service.close()


def attach(service: "ServiceImpl", settings: ServeSettings, log_stats: bool) -> None:
    """Connect the service of an HTTP process to the deployments, which may not be up yet."""
    from ray import serve

    from rayllm.serving.elastic import ServeScaler

    group = settings.data_parallel
    router = app_name(ROUTER_APP, group)
    engines = serve.get_deployment_handle("engine", app_name(ENGINE_APP, group), _check_exists=False)
    service.attach(
        engines,
        # One engine leaves a router nothing to choose, and then there is none.
        serve.get_deployment_handle("router", router, _check_exists=False) if has_router(group) else None,
        serve.get_deployment_handle("renderer", app_name(RENDERER_APP, group), _check_exists=False),
        log_stats,
        settings.aggregate_stats,
        scaler=ServeScaler(engines) if group.elastic else None,
    )


def app_name(name: str, group: DataParallel) -> str:
    """What an application is called: servers of one group may share a cluster."""
    return name if group.alone else f"{name}-{group.first}"


def has_router(group: DataParallel) -> bool:
    """Whether there may be engines to choose among."""
    return group.engines > 1 or group.elastic


async def _unless(stop: asyncio.Event, task: Coroutine[Any, Any, None]) -> bool:
    """Whether a task was done before the event was set, which cancels it.

    Raises:
        Exception: what the task raises.
    """
    stopping, doing = asyncio.create_task(stop.wait()), asyncio.create_task(task)
    try:
        await asyncio.wait([stopping, doing], return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        for one in (stopping, doing):
            one.cancel()


class _Launch:
    """One run of `rayllm serve`."""

    def __init__(
        self, resolved: Resolved, environment: Environment, cluster: Cluster, listener: socket.socket, began: float
    ) -> None:
        self._resolved = resolved
        self._settings = resolved.serve
        self._group = resolved.serve.data_parallel
        self._environment = environment
        self._cluster = cluster
        self._listener = listener
        self._began = began
        self._processes: ApiProcesses | None = None

    async def run(self) -> int:
        """Start, serve, stop."""
        stop = asyncio.Event()
        catch_signals(stop)
        try:
            async with contextlib.AsyncExitStack() as meeting:
                if await _unless(stop, self._meet(meeting)):
                    return await self._start_and_serve(stop)
                return 0
        finally:
            self._remove_files()

    async def _meet(self, meeting: contextlib.AsyncExitStack) -> None:
        """Wait for the other servers of the group, if it is to meet; `meeting` ends what that began.

        Raises:
            ConfigError: the meeting place is not to be had, or this server does not fit the others.
        """
        group = self._group
        if group.meeting is None:
            return
        model, ranks = self._settings.frontend.served_model_names[0], list(group.ranks)
        if group.first > 0:
            member = GroupMember(*group.meeting, Join(size=group.size, ranks=ranks, model=model))
            meeting.push_async_callback(member.close)
            await member.join()
            return
        server = GroupServer(group.size, model, ranks)
        meeting.push_async_callback(server.close)
        await server.start(*group.meeting)
        await server.wait_complete()

    def _remove_files(self) -> None:
        self._listener.close()
        self._cluster.remove_files()
        if self._settings.http.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._settings.http.uds)

    async def _start_and_serve(self, stop: asyncio.Event) -> int:
        loop = asyncio.get_running_loop()
        log.info("starting Ray" if self._cluster.private else "joining Ray")
        # Imported here, in one thread: Ray's modules import each other in circles, which two threads must not enter.
        from rayllm.serving.application import Runtime, build_frontend

        runtime = Runtime.of(self._environment, self._settings.log_config)
        deployed = asyncio.wrap_future(self._cluster.submit(functools.partial(self._deploy, runtime)), loop=loop)
        app, service = build_frontend(self._settings.frontend, f"http-{os.getpid()}-0", runtime.limits)
        server = make_server(app, service, self._settings, self._listener)
        server.start()
        stopping = asyncio.create_task(stop.wait())
        try:
            serving = asyncio.create_task(self._serve(deployed, service, runtime, stop))
            await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)
            if not deployed.done() and self._cluster.private:
                # Ray is half started and cannot be asked to stop; its processes end with this one.
                self._remove_files()
                sys.stderr.flush()
                os._exit(INTERRUPTED)
            if serving.done():
                serving.result()
                await stop.wait()
            log.info("shutting down")
            serving.cancel()
            return 0
        finally:
            stopping.cancel()
            await self._end(server, service)

    def _deploy(self, runtime: Any) -> None:
        """In Ray's thread."""
        from rayllm.serving.application import engine_app

        self._cluster.start()
        log.info("Ray is up after %.1f s; loading %s", self._elapsed(), self._resolved.engine.model.path)
        group, node = self._group, None
        # A private Ray has no other node, and a single engine has no others to be near to.
        if group.one_node and (group.engines > 1 or group.elastic) and not self._cluster.private:
            node = self._cluster.node
        if group.per_node is not None and (room := group.per_node * self._cluster.nodes) < group.engines:
            log.warning(
                "--data-parallel-size-local %d: the cluster has room for %d of %d engines; the others wait for nodes",
                group.per_node, room, group.engines,
            )  # fmt: skip
        engines = engine_app(self._resolved, runtime, node)
        self._cluster.deploy([(app_name(ENGINE_APP, group), engines)], elastic=group.elastic)

    async def _serve(
        self, deployed: "asyncio.Future[None]", service: "ServiceImpl", runtime: Any, stop: asyncio.Event
    ) -> None:
        """Get from deployed to healthy, and start what may come up later."""
        from ray import serve

        from rayllm.serving.application import renderer_app, router_app

        await deployed
        catch_signals(stop)
        engines = serve.get_deployment_handle("engine", app_name(ENGINE_APP, self._group), _check_exists=False)
        attach(service, self._settings, self._settings.log_stats)
        await self._healthy(service)
        helpers = [(app_name(RENDERER_APP, self._group), renderer_app(self._resolved, runtime))]
        if has_router(self._group):
            helpers.append((app_name(ROUTER_APP, self._group), router_app(engines, runtime)))
        address = await asyncio.wrap_future(self._cluster.submit(lambda: self._cluster.address))
        self._start_api_processes(address)
        self._announce()
        await asyncio.wrap_future(self._cluster.submit(functools.partial(self._cluster.deploy, helpers)))

    async def _healthy(self, service: "ServiceImpl") -> None:
        """Wait for the first engine, or for the news that there will be none."""
        healthy, done = asyncio.create_task(service.wait_healthy()), threading.Event()
        app = app_name(ENGINE_APP, self._group)
        watch = self._cluster.submit(functools.partial(self._cluster.watch_start, app, done))
        watching = asyncio.wrap_future(watch)
        try:
            await asyncio.wait([healthy, watching], return_when=asyncio.FIRST_COMPLETED)
            if not healthy.done():
                watching.result()
        finally:
            done.set()
            healthy.cancel()
            with contextlib.suppress(RayLLMError):
                await watching

    def _start_api_processes(self, address: str) -> None:
        from rayllm.serving.api_process import ApiProcess, ApiProcesses

        plans = [
            ApiProcess(number=number, settings=self._settings, environment=self._environment, address=address)
            for number in range(1, self._settings.http.servers)
        ]
        self._processes = ApiProcesses(plans, self._listener)

    async def _end(self, server: Server, service: "ServiceImpl") -> None:
        ends = [end_server(server, service, self._settings.http)]
        if self._processes is not None:
            ends.append(self._processes.stop(self._settings.http.shutdown_timeout_s + STOP_S))
        await asyncio.gather(*ends)
        family = descendants() if self._cluster.private else []
        await asyncio.to_thread(self._cluster.stop)
        # Ray's agents take most of a minute to notice where their parent ended too fast to tell them.
        await asyncio.to_thread(end, family, GRACE_S)

    def _announce(self) -> None:
        http, name = self._settings.http, self._settings.frontend.served_model_names[0]
        place, needs_key = place_of(http, self._listener), bool(self._settings.frontend.api_keys)
        command = _grpcurl(place, name, needs_key, http.tls) if http.grpc else _curl(place, name, needs_key, http.tls)
        print(f"\n{name} is served at {place} after {self._elapsed():.1f} s. Try:\n\n{command}\n", flush=True)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began


# Greedy: many models (any GGUF file) name no temperature of their own, and at 1 a small one rambles.
_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def _curl(url: str, model: str, needs_key: bool, tls: TlsSettings | None) -> str:
    """A command to paste into a shell."""
    body = {"model": model, "messages": _QUESTION, "temperature": 0}
    place = f"{url}/v1/chat/completions"
    if url.startswith("unix:"):
        place = f"--unix-socket {url[5:]} {'https' if tls else 'http'}://localhost/v1/chat/completions"
    if tls is not None:
        # Its certificate is for the name that others know this machine by.
        place = f"--insecure {'--cert YOUR_CERT --key YOUR_KEY ' if tls.cert_reqs == 2 else ''}{place}"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    return f"curl {place} -H 'Content-Type: application/json'{key} \\\n  -d '{json.dumps(body)}'"


def _grpcurl(address: str, model: str, needs_key: bool, tls: TlsSettings | None) -> str:
    """The same for a gRPC server, which tells grpcurl of its messages."""
    body = {"model": model, "messages": _QUESTION, "parameters": {"temperature": 0}}
    key = " -H 'authorization: Bearer YOUR_KEY'" if needs_key else ""
    how = "-plaintext" if tls is None else "-insecure" + (" -cert YOUR_CERT -key YOUR_KEY" if tls.cert_reqs else "")
    return f"grpcurl {how}{key} \\\n  -d '{json.dumps(body)}' {address} rayllm.v1.LLM/Chat"
