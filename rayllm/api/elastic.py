"""Endpoints that change the number of engines while they serve (`--enable-elastic-ep`)."""

from pydantic import Field

from rayllm.api.call import Call
from rayllm.api.errors import ErrorReply
from rayllm.api.front import Front
from rayllm.api.parse import parse_request
from rayllm.api.wire import Wire


class ScaleRequest(Wire):
    """`POST /scale_elastic_ep`."""

    new_data_parallel_size: int = Field(ge=1, le=1024)
    drain_timeout: float = Field(default=120.0, gt=0, le=86_400, allow_inf_nan=False)
    """Seconds in which it is to be done."""


class Elastic:
    """Requests go on meanwhile: those of an engine that ends in another one, with no token lost."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def scale(self, call: Call) -> None:
        """Have so many engines; answered once they serve and those that are too many have ended."""
        request = parse_request(ScaleRequest, await call.body(self._front.settings.max_body_bytes))
        size = request.new_data_parallel_size
        try:
            await self._front.service.scale(size, request.drain_timeout)
        except TimeoutError:
            message = f"there are not {size} engines after {request.drain_timeout:g} s yet; the change goes on"
            await call.error(ErrorReply(408, message))
        else:
            await call.json({"message": f"Scaled to {size} data parallel engines"})

    async def is_scaling(self, call: Call) -> None:
        """Whether their number is changing."""
        await call.json({"is_scaling_elastic_ep": await self._front.service.scaling()})
