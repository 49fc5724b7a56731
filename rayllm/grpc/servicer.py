"""The service `rayllm.v1.LLM`."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc
import grpc.aio

from rayllm.api.middleware import App
from rayllm.errors import RequestError
from rayllm.grpc import rayllm_pb2 as pb
from rayllm.grpc.convert import (
    Json,
    answer,
    chat_fields,
    completion_fields,
    models_answer,
    token_fields,
    tokenize_answer,
)
from rayllm.grpc.exchange import Context, Exchange
from rayllm.grpc.rayllm_pb2_grpc import LLMServicer

R = TypeVar("R")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


class Servicer(LLMServicer):
    """Answers RPCs by what the HTTP app answers. See `rayllm.proto` for what each takes and gives."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._running = 0
        self.idle = asyncio.Event()
        """Set while no RPC of this service runs."""
        self.idle.set()

    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.Answer:
        """Answer a conversation."""
        return answer(await self._post(context, CHAT, chat_fields, request))

    async def StreamChat(self, request: pb.ChatRequest, context: Context) -> None:
        """Answer a conversation in pieces."""
        await self._stream(context, CHAT, chat_fields, request)

    async def Complete(self, request: pb.CompletionRequest, context: Context) -> pb.Answer:
        """Go on with a text."""
        return answer(await self._post(context, COMPLETIONS, completion_fields, request))

    async def StreamComplete(self, request: pb.CompletionRequest, context: Context) -> None:
        """Go on with a text in pieces."""
        await self._stream(context, COMPLETIONS, completion_fields, request)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeAnswer:
        """The token ids of a text or a conversation."""
        return tokenize_answer(await self._post(context, "/tokenize", token_fields, request))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeAnswer:
        """The text of token ids."""
        return pb.DetokenizeAnswer(**await self._post(context, "/detokenize", token_fields, request))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsAnswer:
        """All names that requests may give."""
        with self._counted():
            return models_answer(await Exchange(self._app, context, "GET", "/v1/models").json())

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsAnswer:
        """The metrics of the whole service."""
        with self._counted():
            return pb.GetMetricsAnswer(text=(await Exchange(self._app, context, "GET", "/metrics").body()).decode())

    async def StartProfile(self, request: pb.ProfileRequest, context: Context) -> pb.ProfileAnswer:
        """Begin a profile of the engines."""
        with self._counted():
            await Exchange(self._app, context, "POST", "/start_profile").body()
            return pb.ProfileAnswer()

    async def StopProfile(self, request: pb.ProfileRequest, context: Context) -> pb.ProfileAnswer:
        """End it, and have its trace written."""
        with self._counted():
            await Exchange(self._app, context, "POST", "/stop_profile").body()
            return pb.ProfileAnswer()

    async def _post(self, context: Context, path: str, convert: Callable[[R], Json], request: R) -> Json:
        with self._counted():
            fields = await _converted(context, convert, request)
            return await Exchange(self._app, context, "POST", path, fields).json()

    async def _stream(self, context: Context, path: str, convert: Callable[[R], Json], request: R) -> None:
        async def write(event: Json) -> None:
            try:
                await context.write(answer(event))
            except grpc.aio.InternalError:
                # The client has left, of which the task is about to be told by being cancelled.
                raise asyncio.CancelledError from None

        with self._counted():
            fields = await _converted(context, convert, request)
            await Exchange(self._app, context, "POST", path, fields | STREAM).events(write)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self.idle.set()


async def _converted(context: Context, convert: Callable[[R], Json], request: R) -> Json:
    try:
        return convert(request)
    except RequestError as error:
        metadata = (("param", error.param),) if error.param else ()
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message, metadata)
