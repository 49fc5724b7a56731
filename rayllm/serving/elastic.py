"""Changes the number of engine replicas while they serve, by Serve's own means for scalers from outside.

A replica that is one too many closes its sessions when Serve ends it, and the ingresses go on elsewhere with what it
was answering; a new one takes part as soon as it is listed. Every HTTP process may ask: what goes on is known to Serve.
"""

import asyncio
from typing import Any, Protocol

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from rayllm.errors import Overloaded, RayLLMError

POLL_S = 0.2
CHANGING = ("UPSCALING", "DOWNSCALING", "UPDATING")


class Scaler(Protocol):
    """What the service needs to change the number of engines."""

    async def scale(self, engines: int, timeout_s: float) -> None:
        """See `Service.scale`."""
        ...

    async def scaling(self) -> bool:
        """See `Service.scaling`."""
        ...


class ServeScaler:
    """Scales the deployment behind a handle, whose application was deployed with `external_scaler_enabled`."""

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        self._id = engines.deployment_id
        self._asking = asyncio.Lock()

    async def scale(self, engines: int, timeout_s: float) -> None:
        """See `Service.scale`."""
        async with self._asking:
            if await self.scaling():
                raise Overloaded("the number of engines is changing already", retry_after=5.0)
            try:
                await asyncio.to_thread(self._set, engines)
            except RayError as error:
                raise RayLLMError(f"Serve did not take the number of engines: {error}") from error
        async with asyncio.timeout(timeout_s):
            while not _runs(await asyncio.to_thread(self._status), engines):
                await asyncio.sleep(POLL_S)

    async def scaling(self) -> bool:
        """See `Service.scaling`."""
        return (await asyncio.to_thread(self._status)).status in CHANGING

    def _set(self, engines: int) -> None:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        ray.get(controller.update_deployment_replicas.remote(self._id, engines))

    def _status(self) -> Any:
        return serve.status().applications[self._id.app_name].deployments[self._id.name]


def _runs(status: Any, engines: int) -> bool:
    return {state: count for state, count in status.replica_states.items() if count} == {"RUNNING": engines}
