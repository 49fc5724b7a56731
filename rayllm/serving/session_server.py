"""The engine's end of sessions: one socket server in a thread of its own, between ingresses and the step loop.

Each connection is a numbered client of the engine. Requests are admitted or refused at once; each step's outputs go
out as one frame for each client. A connection that ends, falls silent or reads too slowly has its requests aborted.
"""

import asyncio
import contextlib
import hmac
import itertools
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from rayllm.errors import EngineDead, Overloaded, RequestError
from rayllm.messages.engine import Abort, Add, Ask, Command, Hello, Ping, StatsRequest, ToEngine
from rayllm.messages.ingress import (
    Admitted,
    Answer,
    Dead,
    EngineStats,
    Load,
    Pong,
    Rejected,
    RequestOutput,
    Stats,
    StepOutputs,
    Welcome,
)
from rayllm.serving.wire import FrameProtocol, SessionLimits, WireError, encode_frame

log = logging.getLogger(__name__)

Connection = FrameProtocol[ToEngine]
START_S = 10.0


class ServedEngine(Protocol):
    """What a session server needs of an engine; `rayllm.engine.engine.Engine` has it. Thread-safe."""

    def start(self, deliver: Callable[[dict[int, list[RequestOutput]], Load], None]) -> None: ...
    def add(self, client: int, add: Add) -> "Future[None] | None": ...
    def abort(self, client: int, request_id: int, reason: str = "abort") -> None: ...
    def abort_client(self, client: int) -> None: ...
    def load(self) -> Load: ...
    def stats(self) -> EngineStats: ...
    def stalled_s(self) -> float: ...
    def carry_out(self, command: Command) -> Any: ...
    @property
    def dead(self) -> str | None: ...


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session may be opened, and what opens it. `path` is for the same machine, host and port for others."""

    engine_id: str
    secret: str
    path: str | None = None
    host: str = ""
    port: int = 0


class SessionServer:
    """Serves one engine. Public methods may be called from any thread."""

    def __init__(
        self,
        engine: ServedEngine,
        engine_id: str,
        limits: SessionLimits | None = None,
        on_dead: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`on_dead` is called once, from the server's thread, after the sessions were told that the engine failed."""
        self.engine_id = engine_id
        self.dead: str | None = None
        """Why the engine serves no more: it ended, or a step hangs."""
        self._engine = engine
        self._limits = limits or SessionLimits()
        self._on_dead = on_dead
        self._secret = secrets.token_hex(32)
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._numbers = itertools.count()
        self._clients: dict[Connection, int] = {}
        self._connections: dict[int, Connection] = {}
        self._ingresses: dict[str, Connection] = {}
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}
        self._asked: set[asyncio.Task[None]] = set()
        self._folder = ""
        self._tcp: tuple[str, int] | None = None
        self._servers: list[asyncio.AbstractServer] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing: asyncio.Event | None = None

    def start(self) -> None:
        """Listen on a Unix-domain socket and start the engine's loop."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="rllm-sessions", daemon=True)
        self._thread.start()
        started.result(timeout=START_S)
        self._engine.start(self._deliver)

    def address(self, host: str | None = None) -> Address:
        """How to open a session: over the Unix-domain socket, or over TCP at this machine's address `host`.

        The TCP port is opened with the first call that asks for it.
        """
        if host is None:
            return Address(engine_id=self.engine_id, secret=self._secret, path=os.path.join(self._folder, "engine"))
        tcp = self._tcp or self._call(self._listen_tcp(host))
        return Address(engine_id=self.engine_id, secret=self._secret, host=tcp[0], port=tcp[1])

    def shutdown(self) -> None:
        """Close all sessions and end the thread. The engine is the caller's to end. Idempotent."""
        if self._loop is None or self._thread is None or self._closing is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=START_S)

    # -- from the step thread

    def _deliver(self, outputs: dict[int, list[RequestOutput]], load: Load) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # a step that ends after the server was closed
            self._loop.call_soon_threadsafe(self._send_step, outputs, load)

    # -- in the server's thread

    def _call(self, coroutine: Coroutine[Any, Any, tuple[str, int]]) -> tuple[str, int]:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=START_S)

    def _run(self, started: Future[None]) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._serve(started))

    async def _serve(self, started: Future[None]) -> None:
        loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        # Only this user may enter the folder; the secret is needed on top. The name tells whose it is, so that the next
        # server can remove what a killed one left.
        self._folder = tempfile.mkdtemp(prefix=f"rllm-{os.getpid()}-")
        try:
            self._servers.append(
                await loop.create_unix_server(self._make_connection, os.path.join(self._folder, "engine"))
            )
            started.set_result(None)
            while not await self._closed_within(self._limits.watch_s):
                self._watch(loop.time())
        finally:
            for server in self._servers:
                server.close()
            for connection in [*self._clients, *self._strangers]:
                connection.close("the engine is shutting down", flush=True)
            await asyncio.sleep(0)
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _closed_within(self, seconds: float) -> bool:
        assert self._closing is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()

    async def _listen_tcp(self, host: str) -> tuple[str, int]:
        if self._tcp is None:
            server = await asyncio.get_running_loop().create_server(self._make_connection, host, 0)
            self._servers.append(server)
            self._tcp = (host, server.sockets[0].getsockname()[1])
        return self._tcp

    def _make_connection(self) -> Connection:
        connection = FrameProtocol(self._decoder, self._on_frame, self._on_lost, self._limits.max_hello)
        timer = asyncio.get_running_loop().call_later(self._limits.hello_s, connection.close, "said no hello")
        self._strangers[connection] = timer
        return connection

    def _watch(self, now: float) -> None:
        """Drop silent ingresses; declare a failed or hung engine dead."""
        for connection in [c for c in self._clients if now - c.last_heard > self._limits.silence_s]:
            connection.close(f"silent for {self._limits.silence_s:g} s")
        stalled = self._engine.stalled_s()
        if self._engine.dead is not None:
            self._declare_dead(self._engine.dead)
        elif stalled > self._limits.step_s:
            self._declare_dead(f"a step has been running for {stalled:.0f} s")

    def _declare_dead(self, reason: str) -> None:
        if self.dead is not None:
            return
        self.dead = reason
        log.error("the engine is dead: %s", reason)
        for connection in list(self._clients):
            connection.send([Dead(reason)])
            connection.close(reason, flush=True)
        self._on_dead(reason)

    def _send_step(self, outputs: dict[int, list[RequestOutput]], load: Load) -> None:
        if self._engine.dead is not None:
            # These outputs end the requests with an error; the ingresses rather go on with them elsewhere.
            self._declare_dead(self._engine.dead)
            return
        for number, of_client in outputs.items():
            connection = self._connections.get(number)
            if connection is None:
                continue  # lost while the step ran
            if connection.unsent > self._limits.write_buffer:
                connection.close("reads too slowly")
                continue
            frame = encode_frame([StepOutputs(of_client, load)])
            if len(frame) > self._limits.max_frame:
                self._send_piecemeal(connection, number, of_client, load)
            else:
                connection.send_frame(frame)

    def _send_piecemeal(self, connection: Connection, number: int, outputs: list[RequestOutput], load: Load) -> None:
        """One frame for each output; one that is too long by itself (log-probabilities) ends its request."""
        for output in outputs:
            frame = encode_frame([StepOutputs([output], load)])
            if len(frame) > self._limits.max_frame:
                self._engine.abort(number, output.request_id)
                reason = f"its log-probabilities take {len(frame)} bytes in one step, which is too much; ask for fewer"
                frame = encode_frame([StepOutputs([_failed(output.request_id, reason)], load)])
            connection.send_frame(frame)

    def _on_frame(self, connection: Connection, messages: list[ToEngine]) -> None:
        number = self._clients.get(connection)
        if number is None:
            messages = self._greet(connection, messages)
            number = self._clients[connection]
        if connection.unsent > self._limits.write_buffer:
            connection.close("reads too slowly")
            return
        replies = [reply for message in messages if (reply := self._answer(number, message)) is not None]
        if replies:
            connection.send(replies)

    def _greet(self, connection: Connection, messages: list[ToEngine]) -> list[ToEngine]:
        """Check the first message of a connection, make it a client, and return the other messages."""
        hello = messages[0] if messages else None
        if not isinstance(hello, Hello):
            raise WireError("the first message is no hello")
        if not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
            raise WireError("wrong secret")
        if self.dead is not None:
            raise WireError("the engine is dead")
        self._strangers.pop(connection).cancel()
        if old := self._ingresses.get(hello.ingress_id):
            old.close("replaced by a new connection of the same ingress")
        number = next(self._numbers)
        self._clients[connection] = number
        self._connections[number] = connection
        self._ingresses[hello.ingress_id] = connection
        connection.max_frame = self._limits.max_frame
        connection.send([Welcome(self.engine_id)])
        return messages[1:]

    def _answer(self, number: int, message: ToEngine) -> Admitted | Rejected | Pong | Stats | None:
        match message:
            case Add():
                return self._admit(number, message)
            case Abort():
                self._engine.abort(number, message.request_id, message.reason)
                return None
            case Ping():
                return Pong(message.number, self._engine.load(), self._engine.stalled_s())
            case StatsRequest():
                return Stats(message.number, self.engine_id, self._engine.stats())
            case Ask():
                task = asyncio.get_running_loop().create_task(self._carry_out(number, message))
                self._asked.add(task)
                task.add_done_callback(self._asked.discard)
                return None
            case Hello():
                raise WireError("a second hello")

    async def _carry_out(self, number: int, message: Ask) -> None:
        try:
            value = await asyncio.to_thread(self._engine.carry_out, message.command)
            answer = Answer(message.number, msgspec.to_builtins(value, enc_hook=repr))
        except RequestError as refusal:
            answer = Answer(message.number, error=refusal.message, refused=True)
        except Exception as failure:
            log.exception("a command failed: %r", message.command)
            answer = Answer(message.number, error=f"{type(failure).__name__}: {failure}")
        if connection := self._connections.get(number):
            connection.send([answer])

    def _admit(self, number: int, add: Add) -> Admitted | Rejected | None:
        try:
            pending = self._engine.add(number, add)
        except (RequestError, Overloaded, EngineDead) as error:
            return self._refusal(add.request_id, error)
        if pending is None:
            return Admitted(add.request_id)
        loop = asyncio.get_running_loop()

        def answer(done: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the server was closed
                loop.call_soon_threadsafe(self._answer_later, number, add.request_id, done)

        pending.add_done_callback(answer)
        return None

    def _answer_later(self, number: int, request_id: int, done: Future[None]) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        error = done.exception()
        reply = Admitted(request_id) if error is None else self._refusal(request_id, error)
        if reply is not None:
            connection.send([reply])

    def _refusal(self, request_id: int, error: BaseException) -> Rejected | None:
        match error:
            case RequestError():
                return Rejected(request_id, "request", error.message, error.param, error.code)
            case Overloaded():
                return Rejected(request_id, "overloaded", error.message)
            case EngineDead():
                self._declare_dead(str(error))
                return None
        log.error("a request could not be admitted", exc_info=error)
        return Rejected(request_id, "overloaded", "the engine could not admit the request")

    def _on_lost(self, connection: Connection, reason: str) -> None:
        if timer := self._strangers.pop(connection, None):
            timer.cancel()
            log.warning("refused a connection: %s", reason)
            return
        number = self._clients.pop(connection)
        del self._connections[number]
        for ingress_id in [i for i, c in self._ingresses.items() if c is connection]:
            del self._ingresses[ingress_id]
        log.info("session %d ended: %s", number, reason)
        self._engine.abort_client(number)


def _failed(request_id: int, reason: str) -> RequestOutput:
    return RequestOutput(request_id, finish_reason="error", error=reason)
