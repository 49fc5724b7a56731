"""Endpoints that tell about the service: models, health, version, load, metrics."""

from typing import Any

from rayllm import __version__
from rayllm.api.call import Call
from rayllm.api.errors import ErrorReply
from rayllm.api.front import Front, model_not_found
from rayllm.messages.engine import Profile

_PROMETHEUS = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class Info:
    """Answers questions about the service."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def models(self, call: Call) -> None:
        """All names that requests may give."""
        names = self._front.settings.served_model_names
        await call.json({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, call: Call) -> None:
        """One of them, or all where the path ends in a slash."""
        name, names = call.scope["path_params"]["id"], self._front.settings.served_model_names
        if not name:
            await self.models(call)
        elif name not in names:
            raise model_not_found(name, names)
        else:
            await call.json(self._card(name))

    async def health(self, call: Call) -> None:
        """200 with an empty body while requests can be served, else 503 with the reason."""
        reason = self._front.service.healthy()
        if reason is None:
            await call.raw(b"", (b"content-type", b"text/plain; charset=utf-8"))
        else:
            await call.error(ErrorReply(503, reason))

    async def version(self, call: Call) -> None:
        """The version of this software."""
        await call.json({"version": __version__})

    async def load(self, call: Call) -> None:
        """Requests of all engines that run or wait, whichever HTTP process took them; 0 where none are counted."""
        await call.json({"server_load": await self._front.service.load() if self._front.settings.load_tracking else 0})

    async def tokenizer(self, call: Call) -> None:
        """The tokenizer's settings and the chat template."""
        await call.json(self._front.renderer.describe())

    async def metrics(self, call: Call) -> None:
        """Metrics of the whole service, in Prometheus' text format."""
        await call.raw(await self._front.service.metrics(), _PROMETHEUS)

    async def start_profile(self, call: Call) -> None:
        """Begin a profile of the engines."""
        await self._front.service.command(Profile(True))
        await call.json({})

    async def stop_profile(self, call: Call) -> None:
        """End it; its traces are written when this is answered."""
        await self._front.service.command(Profile(False))
        await call.json({})

    def _card(self, name: str) -> dict[str, Any]:
        settings = self._front.settings
        return {
            "id": name,
            "object": "model",
            "created": self._front.created,
            "owned_by": "rayllm",
            "root": settings.model_path,
            "parent": None,
            "max_model_len": settings.max_model_len,
        }
