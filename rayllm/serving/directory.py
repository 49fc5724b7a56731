"""Where the engine replicas are: a Serve request router that tells its own process, and can call one replica.

Serve keeps the list of a deployment's running replicas current in every process that holds a handle to it, inside the
handle's request router. `EngineRequestRouter` passes that list on to whoever sent it a `Watch`, and sends a call that
carries a `Pin` to exactly that replica. Both are arguments of handle calls: the router sees them before they leave
the process.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rayllm.serving.session_server import Address

log = logging.getLogger(__name__)

Changed = Callable[[frozenset[str]], None]


@dataclass(frozen=True, slots=True)
class Pin:
    """Argument of a handle call that must go to this replica and no other."""

    replica_id: str


class Watch:
    """Argument of a handle call by which `changed` gets the ids of the running replicas, now and on every change.

    It stays in the process: to the replica that gets the call it is a `Watch` of nothing.
    """

    def __init__(self, changed: Changed | None = None) -> None:
        self.changed = changed

    def __reduce__(self) -> tuple[type["Watch"], tuple[()]]:
        return Watch, ()


class EngineRequestRouter(RequestRouter):
    """Routes pinned calls to their replica, and others to the less busy of two."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve once, after construction."""
        self._watches: dict[int, Changed] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas that a call may go to; called again after a pause where they are none."""
        if pending_request is None:
            return [_two_of(candidate_replicas)]
        # Without this a pinned call whose replica is gone would spin.
        pending_request.routing_context.should_backoff = True
        for argument in (*pending_request.args, *pending_request.kwargs.values()):
            if isinstance(argument, Pin):
                return [[r for r in candidate_replicas if r.replica_id.unique_id == argument.replica_id]]
            if isinstance(argument, Watch) and argument.changed is not None:
                if id(argument) not in self._watches:
                    self._watches[id(argument)] = argument.changed
                argument.changed(self._running_ids())
        return [_two_of(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when the running replicas change."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve when a call finds a replica dead, before the controller knows."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        for changed in self._watches.values():
            changed(self._running_ids())

    def _running_ids(self) -> frozenset[str]:
        return frozenset(replica_id.unique_id for replica_id in self.curr_replicas)


class ServeDirectory:
    """The replicas of an engine deployment, by its handle. Meets `rayllm.serving.fleet.Directory`."""

    def __init__(self, engines: DeploymentHandle[Any], host: str) -> None:
        """`host` names the machine of this process; replicas of the same one are reached without the network."""
        self._engines = engines
        self._host = host
        self._watch: Watch | None = None
        self._registration: asyncio.Task[None] | None = None

    def watch(self, changed: Changed) -> None:
        """See `Directory.watch`. The first call of `changed` comes with the first replica."""
        self._watch = Watch(changed)
        self._registration = asyncio.get_running_loop().create_task(self._register(self._watch))

    async def open(self, replica_id: str) -> Address:
        """See `Directory.open`."""
        response = self._engines.open_session.remote(Pin(replica_id), self._host)
        try:
            address = await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]  # else a call to a vanished replica would wait for ever
            raise
        assert isinstance(address, Address)
        return address

    async def _register(self, watch: Watch) -> None:
        try:
            await self._engines.announce.remote(watch)
        except Exception as error:
            # The router saw the watch before the call left, so that a replica that fails here does no harm.
            log.debug("the replica that got the watch did not answer: %r", error)


def machine_address() -> str:
    """This machine's address in the Ray cluster that the process belongs to."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _two_of(candidates: list[RunningReplica]) -> list[RunningReplica]:
    return random.sample(candidates, min(2, len(candidates)))
