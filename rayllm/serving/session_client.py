"""The ingress's end of one session: a connection to one engine, with the requests that run over it.

A session lives once. When it ends, for whatever reason, it hands its requests back; `rayllm.serving.fleet` opens new
sessions and finds new places for them.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from rayllm.errors import RayLLMError, RequestError
from rayllm.messages.engine import Abort, Ask, Command, Hello, Ping, StatsRequest
from rayllm.messages.ingress import (
    Admitted,
    Answer,
    Dead,
    EngineStats,
    Load,
    Pong,
    Rejected,
    Stats,
    StepOutputs,
    ToIngress,
    Welcome,
)
from rayllm.serving.session_server import Address
from rayllm.serving.streams import AbortReason, RequestStream
from rayllm.serving.wire import HEADER, FrameProtocol, SessionLimits, WireError, encode

Connection = FrameProtocol[ToIngress]
FRAME_BYTES = 2**20
"""Messages that wait together are sent in frames of about this size."""
Lost = Callable[["Session", list[RequestStream]], None]
"""Gets an ended session and the admitted requests that it leaves unfinished."""


class Session:
    """One open connection. All methods belong to the event loop that opened it."""

    def __init__(self, engine_id: str, limits: SessionLimits, on_lost: Lost) -> None:
        """Use `open`."""
        self.engine_id = engine_id
        self.load = Load()
        self.stalled_s = 0.0
        self.lost: str | None = None
        """Why it ended, once it has."""
        self._limits = limits
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._welcome: asyncio.Future[None] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._connection: Connection | None = None
        self._outbox: list[msgspec.Raw] = []
        self._outbox_bytes = 0
        self._running: dict[int, RequestStream] = {}
        self._offered: dict[int, tuple[RequestStream, asyncio.Future[Rejected | None]]] = {}
        self._unseen = 0
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._heartbeat: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, address: Address, ingress_id: str, limits: SessionLimits, on_lost: Lost) -> "Session":
        """Connect and be let in.

        Raises:
            OSError: nothing listens there.
            ConnectionError: the other end closed the connection, such as for a wrong secret.
            TimeoutError: it did not answer in time.
        """
        session = cls(address.engine_id, limits, on_lost)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(limits.hello_s):
            if address.path is not None:
                _, session._connection = await loop.create_unix_connection(session._make_connection, address.path)
            else:
                _, session._connection = await loop.create_connection(
                    session._make_connection, address.host, address.port
                )
            try:
                session._connection.send([Hello(address.secret, ingress_id)])
                await session._welcome
            except BaseException:
                session._connection.close("gave up opening")
                raise
        session._heartbeat = loop.create_task(session._beat())
        return session

    @property
    def score(self) -> int:
        """How busy the engine is, as far as known: requests it reported and those sent since."""
        return self.load.running + self.load.waiting + self._unseen

    def note_sent(self) -> None:
        """Count a request that someone else is about to send, until the engine's next report."""
        self._unseen += 1

    async def offer(self, stream: RequestStream) -> Rejected | None:
        """Send a request and wait for the answer: None when it is admitted.

        Raises:
            ConnectionError: the session ended before the answer; the request is not here.
        """
        if self.lost is not None:
            raise ConnectionError(self.lost)
        request_id = stream.add.request_id
        message = encode(stream.resumption())
        if len(message) > self._limits.max_frame - HEADER.size:
            return Rejected(request_id, "request", f"the request takes {len(message)} bytes, which is too long")
        answer: asyncio.Future[Rejected | None] = self._loop.create_future()
        self._offered[request_id] = (stream, answer)
        self._unseen += 1
        self._send(message)
        return await answer

    def abort(self, stream: RequestStream, reason: AbortReason) -> None:
        """Forget a request and tell the engine. Does nothing where the request is not here."""
        request_id = stream.add.request_id
        if self._running.pop(request_id, None) is not None or request_id in self._offered:
            self._send(encode(Abort(request_id, reason)))

    async def stats(self) -> EngineStats:
        """The engine's metrics now.

        Raises:
            ConnectionError: the session ended.
        """
        stats: EngineStats = await self._ask(StatsRequest(next(self._numbers)))
        return stats

    async def command(self, command: Command) -> Any:
        """Have the engine carry out a command; what it answers.

        Raises:
            ConnectionError: the session ended.
            RequestError: the command cannot be carried out.
            RayLLMError: the engine failed at it.
        """
        answer: Answer = await self._ask(Ask(next(self._numbers), command))
        if answer.refused:
            raise RequestError(answer.error)
        if answer.error:
            raise RayLLMError(answer.error)
        return answer.value

    async def _ask(self, question: StatsRequest | Ask) -> Any:
        if self.lost is not None:
            raise ConnectionError(self.lost)
        self._asked[question.number] = self._loop.create_future()
        self._send(encode(question))
        try:
            return await self._asked[question.number]
        finally:
            self._asked.pop(question.number, None)

    async def wait_lost(self) -> str:
        """Wait for the end of the session, and say why it came."""
        await self._ended.wait()
        assert self.lost is not None
        return self.lost

    def close(self, reason: str) -> None:
        """End the session now. Its requests are handed back as after any other end."""
        if self._connection is not None:
            self._connection.close(reason)

    # -- what is sent

    def _send(self, message: msgspec.Raw) -> None:
        """Send together with all else of this turn of the event loop, as few frames."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        elif self._outbox_bytes + len(message) > FRAME_BYTES:
            self._flush()
        self._outbox.append(message)
        self._outbox_bytes += len(message)

    def _flush(self) -> None:
        messages, self._outbox, self._outbox_bytes = self._outbox, [], 0
        if self.lost is None and self._connection is not None and messages:
            self._connection.send(messages)

    async def _beat(self) -> None:
        assert self._connection is not None
        while True:
            await asyncio.sleep(self._limits.ping_s)
            if self._loop.time() - self._connection.last_heard > self._limits.silence_s:
                self.close(f"engine silent for {self._limits.silence_s:g} s")
                return
            self._send(encode(Ping(next(self._numbers))))

    # -- what comes

    def _make_connection(self) -> Connection:
        decoder = msgspec.msgpack.Decoder(list[ToIngress])
        return FrameProtocol(decoder, self._on_frame, self._on_end, self._limits.max_frame)

    def _on_frame(self, connection: Connection, messages: list[ToIngress]) -> None:
        for message in messages:
            match message:
                case StepOutputs():
                    self._take_step(message)
                case Admitted():
                    self._settle(message.request_id, None)
                case Rejected():
                    self._settle(message.request_id, message)
                case Pong():
                    self.load, self.stalled_s, self._unseen = message.load, message.stalled_s, len(self._offered)
                case Stats():
                    self._settle_asked(message.number, message.stats)
                case Answer():
                    self._settle_asked(message.number, message)
                case Welcome():
                    if self._welcome.done() or message.engine_id != self.engine_id:
                        raise WireError("an unexpected welcome")
                    self._welcome.set_result(None)
                case Dead():
                    connection.close(f"the engine failed: {message.reason}")

    def _settle_asked(self, number: int, answer: EngineStats | Answer) -> None:
        if (asked := self._asked.get(number)) and not asked.done():
            asked.set_result(answer)

    def _take_step(self, step: StepOutputs) -> None:
        self.load, self._unseen = step.load, len(self._offered)
        for output in step.outputs:
            stream = self._running.get(output.request_id)
            if stream is None:
                continue  # aborted while the step ran
            stream.take(output)
            if stream.done:
                del self._running[output.request_id]

    def _settle(self, request_id: int, refusal: Rejected | None) -> None:
        stream, answer = self._offered.pop(request_id, (None, None))
        if stream is None or answer is None:
            raise WireError(f"an answer to a request that was not sent: {request_id}")
        if refusal is None and not stream.done:
            self._running[request_id] = stream
        if not answer.done():
            answer.set_result(refusal)

    def _on_end(self, connection: Connection, reason: str) -> None:
        self.lost = reason
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        waiting: list[asyncio.Future[Any]] = [self._welcome, *self._asked.values()]
        for future in [*waiting, *(answer for _, answer in self._offered.values())]:
            _break(future, reason)
        streams, self._running, self._offered = list(self._running.values()), {}, {}
        self._ended.set()
        self._on_lost(self, streams)


def _break(future: asyncio.Future[Any], reason: str) -> None:
    if not future.done():
        future.set_exception(ConnectionError(reason))
        future.exception()  # marks it as seen: nobody may be waiting any more
