"""The way from the choices of a request to its answer, streamed or whole."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import msgspec

from rayllm.api.call import Call
from rayllm.api.choice import Choice, Piece
from rayllm.api.errors import ErrorReply

Json = dict[str, Any]
encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


class Sink(Protocol):
    """Takes the events of a stream; `Call` is one."""

    def reply_to(self, error: Exception) -> ErrorReply:
        """What is told of an exception."""
        ...

    async def start_events(self) -> None:
        """Begin."""
        ...

    async def send_events(self, data: bytes, last: bool = False) -> None:
        """Take whole events."""
        ...


class Writer(Protocol):
    """Writes the answers of one endpoint. Events are whole server-sent events."""

    def opening(self) -> bytes:
        """Events before the first piece."""
        ...

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """The event of a piece; empty where there is nothing to tell."""
        ...

    def closing(self) -> bytes:
        """Events after the last piece, the mark of the end included."""
        ...

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """The whole answer, given one piece for each choice."""
        ...


def error_event(error: ErrorReply) -> bytes:
    """The event by which a stream tells that it failed."""
    return b"data: " + encode(error.body()) + b"\n\n" + DONE


async def answer(
    call: Call,
    choices: Sequence[Choice],
    writer: Writer,
    stream: bool,
    failed: Callable[[ErrorReply], bytes] = error_event,
) -> None:
    """Answer a request, and stop its choices in the engines whatever happens.

    `failed` writes the last events of a stream that an error ends.
    """
    try:
        if stream:
            await stream_answer(call, choices, writer, failed)
        else:
            await call.json(writer.whole(await _collect_all(choices)))
    finally:
        for choice in choices:
            choice.close()


async def _collect_all(choices: Sequence[Choice]) -> list[Piece]:
    if len(choices) == 1:
        return [await _collect(choices[0])]
    tasks = [asyncio.ensure_future(_collect(choice)) for choice in choices]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _collect(choice: Choice) -> Piece:
    whole = Piece()
    texts = []
    async for piece in choice.pieces():
        texts.append(piece.text)
        piece.text = ""
        whole.extend(piece)
    whole.text = "".join(texts)
    return whole


async def stream_answer(
    sink: Sink, choices: Sequence[Choice], writer: Writer, failed: Callable[[ErrorReply], bytes]
) -> None:
    """Send events as pieces come. While the client reads slowly, nothing is taken from the streams, which merge.

    The choices are the caller's to close.
    """
    await sink.start_events()
    opening = writer.opening()
    if opening:
        await sink.send_events(opening)
    try:
        pieces = _pieces_of_one(choices[0]) if len(choices) == 1 else _pieces_of_all(choices)
        async for choice, piece in pieces:
            if event := writer.event(choice, piece):
                await sink.send_events(event)
        tail = writer.closing()
    except Exception as e:
        # The status is out, so the error goes into the stream, and no choice gets a finish reason.
        tail = failed(sink.reply_to(e))
    await sink.send_events(tail, last=True)


async def _pieces_of_one(choice: Choice) -> AsyncIterator[tuple[Choice, Piece]]:
    async for piece in choice.pieces():
        yield choice, piece


async def _pieces_of_all(choices: Sequence[Choice]) -> AsyncIterator[tuple[Choice, Piece]]:
    """Pieces of several choices as they come. One piece waits at most, beside one that each choice holds ready."""
    queue: asyncio.Queue[tuple[Choice, Piece | Exception]] = asyncio.Queue(maxsize=1)

    async def pump(choice: Choice) -> None:
        try:
            async for piece in choice.pieces():
                await queue.put((choice, piece))
        except Exception as e:
            await queue.put((choice, e))

    tasks = [asyncio.ensure_future(pump(choice)) for choice in choices]
    try:
        open_choices = len(choices)
        while open_choices:
            choice, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            yield choice, piece
            open_choices -= piece.finish_reason is not None
    finally:
        for task in tasks:
            task.cancel()
