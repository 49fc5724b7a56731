"""Where a data-parallel group meets: the server of rank 0 listens, the others connect, in frames of `wire`.

    server of rank 0: GroupServer ◄── Join ── GroupMember: another server, which waits until all ranks have joined
                           ▲
                           └── Enter, Want ── WaveClient: an engine whose steps are those of the group (`waves`)

A server that goes away is missed in the log, and may join again. An engine that goes away breaks the waves.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence

import msgspec

from rayllm.errors import ConfigError
from rayllm.messages.group import Complete, Enter, FromCoordinator, Join, Refused, ToCoordinator, Want
from rayllm.parallel.waves import AHEAD, Coordinator, Outgoing
from rayllm.serving.wire import FrameProtocol, WireError

log = logging.getLogger(__name__)

Connection = FrameProtocol[ToCoordinator]
MAX_FRAME = 2**16
HELLO_S = 5.0
"""Time in which a connection must say what it is."""
ANSWER_S = 60.0
"""How long a server that joins waits for that of rank 0 to answer at all."""
RETRY_S = 0.5
SAY_S = 10.0
"""How often a server says whom it waits for."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""Seconds and counts after which the kernel gives up a peer that a cut network hides."""


class GroupServer:
    """The group's meeting place. Belongs to the event loop in which `start` was called."""

    def __init__(self, size: int, model: str, own: Sequence[int] = (), ahead: int = AHEAD) -> None:
        """`own` are the ranks of the server that runs this."""
        self._size = size
        self._model = model
        self._waves = Coordinator(size, ahead)
        self._joined = set(own)
        self._servers: dict[Connection, list[int]] = {}
        self._engines: dict[Connection, int] = {}
        self._by_rank: dict[int, Connection] = {}
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}
        self._complete = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._decoder = msgspec.msgpack.Decoder(list[ToCoordinator])

    async def start(self, host: str, port: int) -> int:
        """Listen; the port.

        Raises:
            ConfigError: the address is not this machine's, or the port is taken.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._make_connection, host, port)
        except socket.gaierror as error:
            raise ConfigError("--data-parallel-address", f"{host} is unknown: {error.strerror}") from None
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "--data-parallel-rpc-port",
                f"the server of rank 0 cannot listen at {host}:{port}: {error}",
                "give a free port and, as --data-parallel-address, an address of this machine",
            ) from None
        self._check_complete()
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def missing(self) -> list[int]:
        """Ranks whose server has not joined."""
        return [rank for rank in range(self._size) if rank not in self._joined]

    async def wait_complete(self) -> None:
        """Wait until all ranks have joined, and say now and then which have not."""
        while not self._complete.is_set():
            try:
                async with asyncio.timeout(SAY_S):
                    await self._complete.wait()
            except TimeoutError:
                log.info("waiting for ranks %s of %d to join", ", ".join(map(str, self.missing)), self._size)

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for connection in [*self._servers, *self._engines, *self._strangers]:
            connection.close("the server of rank 0 is shutting down")
        await asyncio.sleep(0)

    def _make_connection(self) -> Connection:
        connection = FrameProtocol(self._decoder, self._on_frame, self._on_lost, MAX_FRAME)
        timer = asyncio.get_running_loop().call_later(HELLO_S, connection.close, "said nothing")
        self._strangers[connection] = timer
        return connection

    def _on_frame(self, connection: Connection, messages: list[ToCoordinator]) -> None:
        for message in messages:
            match message:
                case Join() if connection in self._strangers:
                    self._join(connection, message)
                case Enter() if connection in self._strangers:
                    self._enter(connection, message)
                case Want() if (rank := self._engines.get(connection)) is not None:
                    self._send(self._waves.take(rank, message))
                case _:
                    raise WireError(f"an unexpected {type(message).__name__}")

    def _join(self, connection: Connection, join: Join) -> None:
        _keep_alive(connection)
        if (refused := self._fault(join)) is not None:
            log.warning("refused a server: %s %s", refused.option, refused.reason)
            connection.send([refused])
            connection.close(refused.reason, flush=True)
            return
        self._strangers.pop(connection).cancel()
        self._servers[connection] = join.ranks
        self._joined.update(join.ranks)
        log.info("%s joined; %s", _ranks(join.ranks), f"{len(self.missing)} are missing" if self.missing else "all met")
        if self._complete.is_set():
            connection.send([Complete()])
        self._check_complete()

    def _fault(self, join: Join) -> Refused | None:
        """Why a server cannot be one of this group."""
        if join.size != self._size:
            return Refused("--data-parallel-size", f"is {join.size}, but {self._size} for the server of rank 0")
        if join.model != self._model:
            return Refused("--served-model-name", f"is {join.model!r}, but {self._model!r} for the server of rank 0")
        if not join.ranks or not set(join.ranks) <= set(range(self._size)):
            return Refused("--data-parallel-rank", f"{_ranks(join.ranks)} of {self._size} do not exist")
        if taken := self._joined.intersection(join.ranks):
            return Refused("--data-parallel-rank", f"{_ranks(sorted(taken))} joined already, from another server")
        return None

    def _enter(self, connection: Connection, enter: Enter) -> None:
        _keep_alive(connection)
        try:
            outgoing = self._waves.enter(enter.rank)
        except ValueError as error:
            connection.send([Refused("--data-parallel-rank", str(error))])
            connection.close(str(error), flush=True)
            return
        self._strangers.pop(connection).cancel()
        self._engines[connection] = enter.rank
        self._by_rank[enter.rank] = connection
        self._send(outgoing)

    def _send(self, outgoing: Outgoing) -> None:
        for rank, message in outgoing:
            self._by_rank[rank].send([message])

    def _check_complete(self) -> None:
        if self.missing or self._complete.is_set():
            return
        self._complete.set()
        for connection in self._servers:
            connection.send([Complete()])

    def _on_lost(self, connection: Connection, reason: str) -> None:
        if timer := self._strangers.pop(connection, None):
            timer.cancel()
        elif ranks := self._servers.pop(connection, None):
            self._joined.difference_update(ranks)
            log.warning("the server of %s is gone: %s", _ranks(ranks), reason)
        elif (rank := self._engines.pop(connection, None)) is not None:
            self._send(self._waves.leave(rank, reason))
            # Those that were told are of no more use, and come back as others.
            broken, self._engines, self._by_rank = self._engines, {}, {}
            for other in broken:
                other.close("the group is broken", flush=True)


class GroupMember:
    """Another server's side: joins, and joins again whenever the server of rank 0 was gone.

    Belongs to the event loop in which `join` was called.
    """

    def __init__(self, host: str, port: int, join: Join, answer_s: float = ANSWER_S) -> None:
        self._host, self._port = host, port
        self._join = join
        self._answer_s = answer_s
        self._decoder = msgspec.msgpack.Decoder(list[FromCoordinator])
        self._link: _Link | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Wait until the group is complete.

        Raises:
            ConfigError: nobody answers in time, or the server of rank 0 refuses this one.
        """
        deadline = asyncio.get_running_loop().time() + self._answer_s
        while True:
            try:
                link = await self._connect()
            except OSError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise ConfigError(
                        "--data-parallel-address",
                        f"no server of rank 0 answers at {self._host}:{self._port}: {error.strerror or error}",
                        "start that one with the same --data-parallel-address and --data-parallel-rpc-port",
                    ) from None
                await asyncio.sleep(RETRY_S)
                continue
            log.info("%s waits at %s:%d for the group", _ranks(self._join.ranks), self._host, self._port)
            if await link.complete:
                self._keeping = asyncio.get_running_loop().create_task(self._keep(link))
                return
            deadline = asyncio.get_running_loop().time() + self._answer_s

    async def close(self) -> None:
        """Leave the group."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._link is not None:
            self._link.connection.close("the server is shutting down")
            await asyncio.sleep(0)

    async def _connect(self) -> "_Link":
        self._link = link = _Link(self._decoder)
        await asyncio.get_running_loop().create_connection(lambda: link.connection, self._host, self._port)
        _keep_alive(link.connection)
        link.connection.send([self._join])
        return link

    async def _keep(self, link: "_Link") -> None:
        """Hold the connection, and make another where it ends: the server of rank 0 may have been started anew."""
        while True:
            log.warning("the server of rank 0 is gone: %s", await link.lost)
            if link.complete.exception() is not None:
                log.error("it does not take this one back: %s", link.complete.exception())
                return
            connected = False
            while not connected:
                await asyncio.sleep(RETRY_S)
                with contextlib.suppress(OSError):
                    link, connected = await self._connect(), True


class _Link:
    """One connection to the server of rank 0."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[FromCoordinator]]) -> None:
        loop = asyncio.get_running_loop()
        self.complete: asyncio.Future[bool] = loop.create_future()
        """True once the group is complete, False where the connection ended before; or it was refused."""
        self.lost: asyncio.Future[str] = loop.create_future()
        self.connection = FrameProtocol(decoder, self._on_frame, self._on_lost, MAX_FRAME)

    def _on_frame(self, connection: FrameProtocol[FromCoordinator], messages: list[FromCoordinator]) -> None:
        for message in messages:
            match message:
                case Complete() if not self.complete.done():
                    self.complete.set_result(True)
                case Refused() if not self.complete.done():
                    self.complete.set_exception(ConfigError(message.option, message.reason, "mend one of the servers"))
                    self.complete.exception()  # marks it as seen: nobody may wait for it
                case _:
                    raise WireError(f"an unexpected {type(message).__name__}")

    def _on_lost(self, connection: FrameProtocol[FromCoordinator], reason: str) -> None:
        if not self.complete.done():
            self.complete.set_result(False)
        if not self.lost.done():
            self.lost.set_result(reason)


def _keep_alive(connection: FrameProtocol[ToCoordinator] | FrameProtocol[FromCoordinator]) -> None:
    assert connection.transport is not None
    sock = connection.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
