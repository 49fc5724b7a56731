"""More server processes beside the first, on the same port: each joins the cluster and serves until told to stop."""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnProcess

from rayllm.config.environment import Environment
from rayllm.config.serve import LogSettings, ServeSettings
from rayllm.logs import configure_logging

log = logging.getLogger(__name__)

RESTART_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiProcess:
    """What such a process is told."""

    number: int
    settings: ServeSettings
    environment: Environment
    address: str
    """Of the Ray cluster."""


def run(plan: ApiProcess, listener: socket.socket) -> None:
    """The process's main function."""
    from rayllm.serving.launch import run_in_loop

    # Ctrl-C in a terminal reaches the whole group, but the end is the first process's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs = LogSettings(level=plan.environment.logging_level, config=plan.settings.log_config)
    configure_logging(logs)
    os._exit(run_in_loop(_serve(plan, listener)))


async def _serve(plan: ApiProcess, listener: socket.socket) -> int:
    import ray

    from rayllm.serving.application import Runtime, build_frontend
    from rayllm.serving.launch import attach, catch_signals, end_server
    from rayllm.serving.server import make_server

    stop = asyncio.Event()
    catch_signals(stop, [signal.SIGTERM])
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The first process ends this one, and its death does too.
    asyncio.get_running_loop().add_reader(parent.sentinel, stop.set)
    runtime = Runtime.of(plan.environment, plan.settings.log_config)
    await asyncio.to_thread(ray.init, address=plan.address, logging_level=logging.ERROR, log_to_driver=False)
    catch_signals(stop, [signal.SIGTERM])
    # Else processes would give equal seeds to different requests.
    frontend = replace(plan.settings.frontend, seed=plan.settings.frontend.seed + (plan.number << 64))
    app, service = build_frontend(frontend, f"http-{os.getpid()}-{plan.number}", runtime.limits)
    attach(service, plan.settings, log_stats=False)
    await service.wait_healthy()
    server = make_server(app, service, plan.settings, listener)
    server.start()
    log.info("server %d is up", plan.number)
    await stop.wait()
    await end_server(server, service, plan.settings.http)
    return 0


class ApiProcesses:
    """Starts such processes from the first one, replaces those that die, and ends them."""

    def __init__(self, plans: Sequence[ApiProcess], listener: socket.socket) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._listener = listener
        self._stopping = False
        self._processes: dict[int, SpawnProcess] = {}
        self._keepers = [asyncio.get_running_loop().create_task(self._keep(plan)) for plan in plans]

    async def stop(self, grace_s: float) -> None:
        """End all of them; those that take longer than `grace_s` are killed."""
        self._stopping = True
        for process in self._processes.values():
            process.terminate()
        _, late = await asyncio.wait(self._keepers, timeout=grace_s) if self._keepers else (set(), set())
        if late:
            for process in self._processes.values():
                process.kill()
            await asyncio.wait(late)

    async def _keep(self, plan: ApiProcess) -> None:
        while not self._stopping:
            process = self._context.Process(target=run, args=(plan, self._listener), name=f"rllm-http-{plan.number}")
            process.start()
            self._processes[plan.number] = process
            await asyncio.to_thread(process.join)
            if not self._stopping:
                log.error("server %d ended (%s); starting another", plan.number, process.exitcode)
                await asyncio.sleep(RESTART_S)
