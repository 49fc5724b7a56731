"""The engine deployment: one replica runs one engine, serves sessions with ingresses, and answers handle calls."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from ray import serve

from rayllm.config.engine import EngineConfig
from rayllm.config.serve import FrontendSettings, LogSettings
from rayllm.errors import EngineDead
from rayllm.logs import configure_logging
from rayllm.messages.generation import Generation, Piece, Prompt
from rayllm.serving.directory import machine_address
from rayllm.serving.fleet import Fleet
from rayllm.serving.generation import Generator
from rayllm.serving.pins import Pin, Watch
from rayllm.serving.session_server import Address, SessionServer
from rayllm.serving.wire import SessionLimits

log = logging.getLogger(__name__)

EXIT_S = 0.5
"""Between telling the sessions that the engine failed and ending the process, so that Serve replaces it."""


class EngineServer:
    """One engine replica. Methods are called through a Serve handle, in the replica's event loop."""

    def __init__(
        self, engine: EngineConfig, frontend: FrontendSettings, limits: SessionLimits, logs: LogSettings
    ) -> None:
        """Load the model; takes seconds.

        Raises:
            ModelError: the model's files cannot be used.
            ConfigError: an option cannot be honoured on this machine.
        """
        from rayllm.engine.engine import Engine  # this process alone needs the engine room

        configure_logging(logs)
        self._frontend = frontend
        self._limits = limits
        self._generator: Generator | None = None
        self._fleet: Fleet | None = None
        self._host = machine_address()
        engine_id = serve.get_replica_context().replica_id.unique_id
        self._engine = Engine.build(engine)
        self._sessions = SessionServer(self._engine, engine_id, limits, _exit_soon)
        self._sessions.start()
        log.info("engine %s serves", engine_id)

    async def announce(self, watch: Watch) -> None:
        """For `ServeDirectory`: the call is seen by the caller's request router, and that is all it is for."""

    async def open_session(self, pin: Pin, host: str) -> Address:
        """Where and by which secret the caller, a process on machine `host`, may open a session with this replica."""
        assert pin.replica_id == self._sessions.engine_id, "a pinned call went elsewhere"
        return await asyncio.to_thread(self._sessions.address, None if host == self._host else self._host)

    async def generate(self, prompt: Prompt, sampling: Mapping[str, Any] | None = None) -> Generation:
        """The whole answer to a text, token ids, or a conversation; for handle calls of other applications.

        `sampling` holds fields of `rayllm.messages.sampling.SamplingParams`; what is missing comes from the model's
        generation config.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
            Overloaded: the engine is full.
        """
        return await self._generating().generate(prompt, sampling)

    async def stream(self, prompt: Prompt, sampling: Mapping[str, Any] | None = None) -> AsyncIterator[Piece]:
        """As `generate`, piece by piece; call it on `handle.options(stream=True)`."""
        async for piece in self._generating().stream(prompt, sampling):
            yield piece

    async def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker of this engine, such as one of --worker-extension-cls; one result a worker.

        For handle calls of other applications, as `generate` is.

        Raises:
            AttributeError: workers have no such method.
            Exception: what the method raises.
        """
        return await asyncio.to_thread(self._engine.collective_rpc, method, *args, **kwargs)

    async def check_health(self) -> None:
        """Called by Serve; an exception makes it replace the replica.

        Raises:
            EngineDead: the engine failed, or a step hangs.
        """
        if self._sessions.dead is not None:
            raise EngineDead(self._sessions.dead)

    async def __del__(self) -> None:
        """Called by Serve when it ends the replica, also after a failed construction."""
        if fleet := getattr(self, "_fleet", None):
            await fleet.close()
        if sessions := getattr(self, "_sessions", None):
            await asyncio.to_thread(sessions.shutdown)
        if engine := getattr(self, "_engine", None):
            await asyncio.to_thread(engine.shutdown)

    def _generating(self) -> Generator:
        """Handle calls go through a session like all others, so that they share admission, abort and merging."""
        if self._generator is None:
            from rayllm.render.renderer import Renderer

            self._fleet = Fleet(_OwnEngine(self._sessions), f"handle-{self._sessions.engine_id}", self._limits)
            self._fleet.start()
            self._generator = Generator(self._frontend, Renderer.load(self._frontend), self._fleet)
        return self._generator


class _OwnEngine:
    """A directory of this process's own engine."""

    def __init__(self, sessions: SessionServer) -> None:
        self._sessions = sessions

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        """See `Directory.watch`."""
        changed(frozenset({self._sessions.engine_id}))

    async def open(self, replica_id: str) -> Address:
        """See `Directory.open`."""
        return self._sessions.address()


def _exit_soon(reason: str) -> None:
    """End the process: a failed engine cannot be mended, and a hung one cannot even be asked to stop."""
    timer = threading.Timer(EXIT_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
