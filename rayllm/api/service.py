"""What the HTTP app needs from the service behind it: one interface, met by `serving` and by a fake in tests."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from rayllm.messages.engine import Add, Command
from rayllm.messages.ingress import RequestOutput


class Stream(Protocol):
    """The outputs of one admitted choice. Iterating ends after the output that has a finish reason.

    A slow reader loses nothing and costs nothing: outputs that wait are merged into one.
    """

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Outputs as they come, each with the tokens since the last one.

        Raises (from the iterator):
            ReplicaLost: the engine is gone and no other can go on with the request.
        """
        ...

    def abort(self, reason: str = "abort") -> None:
        """Stop the request (`abort`: its client left, `stop`: a stop string ended it). Idempotent, never blocks."""
        ...


class Service(Protocol):
    """The service as the HTTP app sees it."""

    async def submit(self, adds: list[Add]) -> list[Stream]:
        """Send all choices of one HTTP request to the engines, and wait until each is admitted.

        `request_id` of each Add is ignored and assigned here. If one is refused, or the wait is cancelled
        because the client left, the others are aborted.

        Raises:
            RequestError: an engine refused it as wrong.
            Overloaded: no engine can take it now.
        """
        ...

    async def render_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> list[int]:
        """Token ids of a conversation; in this process or in the renderer deployment, whichever is cheaper.

        `options` are those of `rayllm.render.renderer.Renderer.render_chat`.

        Raises:
            RequestError: the template refuses the conversation.
        """
        ...

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def healthy(self) -> str | None:
        """None while at least one engine serves, else why not."""
        ...

    async def load(self) -> int:
        """Requests of all engines that run or wait at this moment."""
        ...

    async def metrics(self) -> bytes:
        """Prometheus text for the whole service."""
        ...

    async def scale(self, engines: int, timeout_s: float) -> None:
        """Have so many engines, and wait until they serve and those that are too many have ended.

        Raises:
            Overloaded: their number is changing already.
            TimeoutError: it is not done in time; the change goes on.
        """
        ...

    async def scaling(self) -> bool:
        """Whether the number of engines is changing."""
        ...

    async def command(self, command: Command) -> list[Any]:
        """Have every engine that serves now carry out a command; what each answers.

        Raises:
            RequestError: the command cannot be carried out.
            RayLLMError: an engine failed at it.
        """
        ...
