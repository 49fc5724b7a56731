"""Where the engine replicas are, as an ingress finds out: by a `Watch` and pinned calls on a Serve handle."""

import asyncio
import logging
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle

from rayllm.serving.pins import Changed, Pin, Watch
from rayllm.serving.session_server import Address

log = logging.getLogger(__name__)


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
