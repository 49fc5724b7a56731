"""One choice of a request as the ingress holds it: what was asked, what came so far, and who waits for more."""

import asyncio
from collections.abc import AsyncIterator
from typing import Literal, Protocol, cast

from msgspec.structs import replace

from rayllm.errors import RayLLMError
from rayllm.messages.engine import Add
from rayllm.messages.ingress import RequestOutput, merge

AbortReason = Literal["abort", "stop"]


class Place(Protocol):
    """Where a request runs."""

    def abort(self, stream: "RequestStream", reason: AbortReason) -> None:
        """Forget the request there. Does nothing where it is not, or no more."""
        ...


class RequestStream:
    """The outputs of one choice, wherever it runs. Meets `rayllm.api.service.Stream`.

    Outputs that wait for a slow reader are merged into one, so a stream holds at most one output of its own length.
    The tokens so far are kept, so that the request can go on in another engine.
    """

    def __init__(self, add: Add) -> None:
        self.add = add
        """With this ingress's `request_id`."""
        self.done = False
        """Nothing more comes from an engine."""
        self.place: Place | None = None
        """Set by whoever places it."""
        self._tokens = list(add.output_token_ids)
        self._began = False
        self._waiting: RequestOutput | None = None
        self._error: RayLLMError | None = None
        self._waker: asyncio.Future[None] | None = None

    # -- for the reader

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while self._waiting is None:
            if self._error is not None:
                raise self._error
            if self.done:
                raise StopAsyncIteration
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        output, self._waiting = self._waiting, None
        return output

    def abort(self, reason: str = "abort") -> None:
        """Stop the request, for the reason `abort` or `stop`; the iterator ends. Idempotent, never blocks."""
        assert reason in ("abort", "stop"), reason
        if not self.done:
            self.done = True
            self._wake()
            if self.place is not None:
                self.place.abort(self, cast(AbortReason, reason))

    # -- for the fleet

    def take(self, output: RequestOutput) -> None:
        """Take in what one step produced."""
        if self.done:
            return
        if self._began and (output.cached_tokens is not None or output.prompt_logprobs is not None):
            # The first output of another engine: the reader knows these already.
            output = replace(output, cached_tokens=None, prompt_logprobs=None)
        self._began = True
        self._tokens += output.token_ids
        self._waiting = output if self._waiting is None else merge(self._waiting, output)
        self.done = output.finish_reason is not None
        self._wake()

    def fail(self, error: RayLLMError) -> None:
        """End with an error; outputs that wait are still read first."""
        if not self.done:
            self.done = True
            self._error = error
            self._wake()

    def resumption(self) -> Add:
        """The request as another engine must get it to go on: with the tokens so far as output."""
        sampling = self.add.sampling
        if self._began and sampling.prompt_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(self.add, output_token_ids=list(self._tokens), sampling=sampling)

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)
