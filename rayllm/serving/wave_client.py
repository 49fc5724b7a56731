"""An engine's place in the waves of its group: a connection to the coordinator, on a thread of its own."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from rayllm.errors import EngineDead
from rayllm.messages.group import Broken, Enter, FromCoordinator, Refused, Run
from rayllm.parallel.waves import AHEAD, Member
from rayllm.serving.coordinator import MAX_FRAME
from rayllm.serving.wire import FrameProtocol, WireError

Connection = FrameProtocol[FromCoordinator]
START_S = 10.0


class WaveClient:
    """Meets `rayllm.engine.waves.Waves`."""

    alone = False

    def __init__(self, rank: int, ahead: int = AHEAD) -> None:
        self._rank = rank
        self._member = Member(ahead)
        self._wake: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Connection | None = None
        self._ended: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int) -> None:
        """Connect and enter the group.

        Raises:
            OSError: no coordinator answers there.
        """
        entered: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(host, port, entered), name="rllm-waves", daemon=True)
        self._thread.start()
        entered.result(START_S)

    def watch(self, wake: Callable[[], None]) -> None:
        """See `Waves.watch`."""
        self._wake = wake

    def may_step(self, has_work: bool) -> bool:
        """See `Waves.may_step`."""
        if self._member.broken is not None:
            raise EngineDead(self._member.broken)
        if (want := self._member.ask(has_work)) is not None:
            assert self._loop is not None
            assert self._connection is not None
            with contextlib.suppress(RuntimeError):  # the loop was just closed
                self._loop.call_soon_threadsafe(self._connection.send, [want])
        return self._member.may_step

    def stepped(self) -> None:
        """See `Waves.stepped`."""
        self._member.stepped()

    def shutdown(self) -> None:
        """Leave the group, which ends it for all. Idempotent."""
        if self._loop is None or self._ended is None or self._thread is None:
            return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(START_S)

    def _run(self, host: str, port: int, entered: "Future[None]") -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._stay(host, port, entered))

    async def _stay(self, host: str, port: int, entered: "Future[None]") -> None:
        self._ended = asyncio.Event()
        decoder = msgspec.msgpack.Decoder(list[FromCoordinator])
        connection = self._connection = FrameProtocol(decoder, self._on_frame, self._on_lost, MAX_FRAME)
        try:
            async with asyncio.timeout(START_S / 2):
                await asyncio.get_running_loop().create_connection(lambda: connection, host, port)
        except (OSError, TimeoutError) as error:
            entered.set_exception(error)
            return
        connection.send([Enter(self._rank)])
        entered.set_result(None)
        await self._ended.wait()
        connection.close("the engine is shutting down")
        await asyncio.sleep(0)

    def _on_frame(self, connection: Connection, messages: list[FromCoordinator]) -> None:
        for message in messages:
            match message:
                case Run() | Broken():
                    self._member.take(message)
                case Refused():
                    self._member.take(Broken(f"the group refused this engine: {message.reason}"))
                case _:
                    raise WireError(f"an unexpected {type(message).__name__}")
        self._wake()

    def _on_lost(self, connection: Connection, reason: str) -> None:
        if self._member.broken is None:
            self._member.take(Broken(f"the connection to the group's coordinator ended: {reason}"))
        assert self._ended is not None
        self._ended.set()
        self._wake()
