"""The router deployment: which engine replica a request goes to.

For now by load alone; it is where cached prefixes and loaded adapters will count. An ingress that does not hear from
it in time uses its own view of the load, so losing the router loses only hints.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from rayllm.config.serve import LogSettings
from rayllm.logs import configure_logging
from rayllm.serving.batcher import Batcher
from rayllm.serving.directory import ServeDirectory, machine_address
from rayllm.serving.fleet import Fleet
from rayllm.serving.wire import SessionLimits

log = logging.getLogger(__name__)

PING_S = 0.2
"""The router gets no step outputs, so it learns the load by heartbeats."""
ANSWER_S = 0.25
"""An ingress waits no longer for the router than this."""
QUIET_S = 5.0
"""And does not ask again for so long after it got no answer."""


@dataclass(frozen=True, slots=True)
class Pick:
    """One request to be placed. `candidates` are engine ids with which the ingress has a session."""

    candidates: tuple[str, ...]


class Router:
    """One replica of the router deployment."""

    def __init__(self, engines: DeploymentHandle[Any], limits: SessionLimits, logs: LogSettings) -> None:
        configure_logging(logs)
        self._engines = engines
        self._limits = replace(limits, ping_s=PING_S)
        self._fleet: Fleet | None = None

    async def pick(self, picks: Sequence[Pick]) -> list[str | None]:
        """An engine id for each request, or None where the router knows none of its candidates."""
        fleet = await self._watching()
        return [_least_loaded(fleet, pick) for pick in picks]

    async def check_health(self) -> None:
        """Called by Serve; starts the sessions, so that the first request finds them open."""
        await self._watching()

    async def _watching(self) -> Fleet:
        if self._fleet is None:
            from ray import serve

            ingress_id = f"router-{serve.get_replica_context().replica_id.unique_id}"
            directory = ServeDirectory(self._engines, machine_address())
            self._fleet = Fleet(directory, ingress_id, self._limits)
            self._fleet.start()
        return self._fleet

    async def __del__(self) -> None:
        """Called by Serve when it ends the replica."""
        if fleet := getattr(self, "_fleet", None):
            await fleet.close()


def _least_loaded(fleet: Fleet, pick: Pick) -> str | None:
    known = [session for session in fleet.sessions() if session.engine_id in pick.candidates]
    if not known:
        return None
    best = min(known, key=lambda session: session.score)
    best.note_sent()
    return best.engine_id


class RouterClient:
    """Asks the router, from an ingress. Its `choose` is a `rayllm.serving.fleet.Chooser`."""

    def __init__(self, router: DeploymentHandle[Any]) -> None:
        self._router = router
        self._batcher: Batcher[Pick, str | None] = Batcher(self._call)
        self._quiet_until = 0.0

    async def choose(self, engine_ids: Sequence[str]) -> str | None:
        """The router's choice, or None when it does not answer in time."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._quiet_until:
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._batcher.ask(Pick(tuple(engine_ids)))
        except Exception as error:
            if loop.time() >= self._quiet_until:
                log.info("going without the router for %g s: %r", QUIET_S, error)
            self._quiet_until = loop.time() + QUIET_S
            return None

    async def _call(self, picks: Sequence[Pick]) -> Sequence[str | None]:
        response = self._router.pick.remote(list(picks))
        try:
            async with asyncio.timeout(2 * ANSWER_S):
                answers: Sequence[str | None] = await response
        except (TimeoutError, asyncio.CancelledError):
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        return answers
