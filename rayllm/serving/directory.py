"""Where the engine replicas are, as an ingress finds out: from a handle's request router, and by pinned calls."""

import asyncio
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle

from rayllm.serving.pins import Changed, Pin, replicas_of
from rayllm.serving.session_server import Address


class ServeDirectory:
    """The replicas of an engine deployment, by its handle. Meets `rayllm.serving.fleet.Directory`."""

    def __init__(self, engines: DeploymentHandle[Any], host: str) -> None:
        """`host` names the machine of this process; replicas of the same one are reached without the network."""
        self._engines = engines
        self._host = host

    def watch(self, changed: Changed) -> None:
        """See `Directory.watch`."""
        replicas_of(self._engines.app_name, self._engines.deployment_name).watch(changed)
        # Has the handle make its request router. A call would too, but where there is no replica ask for one.
        self._engines.options(method_name="open_session")

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

    async def wake(self) -> None:
        """See `Directory.wake`."""
        response = self._engines.wake.remote()
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise


def machine_address() -> str:
    """This machine's address in the Ray cluster that the process belongs to."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
