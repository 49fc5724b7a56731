"""How an executor and its ranks talk: two sockets a rank, and memory that ranks of the executor's own machine share.

Frames to a rank are a header (kind, length, offset), then the body, or nothing where the body stands in the shared
memory at that offset: there it is written once, however many ranks read it. Frames from a rank are a length and a body.
Bodies are msgpack, never pickle. The connections are the lifeline of both ends: each ends what it does when they close.
"""

import hmac
import mmap
import os
import secrets
import selectors
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rayllm.messages.rank import FromRank, Hello, ToRank

HEADER = struct.Struct("<BIQ")
LENGTH = struct.Struct("<I")
COUNTER = struct.Struct("<Q")
INLINE, SHARED = 0, 1
RING_BYTES = 4 << 20
"""Bodies in the shared memory: some steps' worth. What finds no room goes over the sockets."""
RING_FOLDER = "/dev/shm"
MAX_HELLO = 4096
RETRY_S = 0.25
MAX_FRAME = 1 << 30


class LinkError(Exception):
    """The other end is gone, or sends what is not a frame of ours."""


class LinkAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where an executor listens, and the secret that lets a rank in. `path` and `ring` are for its own machine."""

    secret: str
    path: str | None = None
    ring: str | None = None
    host: str = ""
    port: int = 0


class _Ring:
    """Memory that one process writes and some read: a counter of bytes read for each reader, then the bodies."""

    def __init__(self, memory: mmap.mmap, readers: int) -> None:
        self._memory, self._readers = memory, readers
        self._begin = -(-readers * COUNTER.size // 64) * 64
        self._size = len(memory) - self._begin
        self._written = 0

    @classmethod
    def create(cls, readers: int) -> "tuple[_Ring, str] | None":
        """A ring and its file; None where the system has no memory to share."""
        try:
            handle, path = tempfile.mkstemp(prefix=f"rllm-{os.getpid()}-", dir=RING_FOLDER)
        except OSError:
            return None
        try:
            os.truncate(handle, RING_BYTES)
            return cls(mmap.mmap(handle, RING_BYTES), readers), path
        except OSError:
            Path(path).unlink()
            return None
        finally:
            os.close(handle)

    @classmethod
    def open(cls, path: str, readers: int) -> "_Ring":
        """A reader's view.

        Raises:
            OSError: it is not on this machine.
        """
        with Path(path).open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0), readers)

    def write(self, body: bytes, among: list[int]) -> int | None:
        """Where the body was written for the readers `among`; None if it finds no room now."""
        length = len(body)
        at = self._written
        if at % self._size + length > self._size:
            at += self._size - at % self._size
        if at + length - min(self._read(reader) for reader in among) > self._size:
            return None
        begin = self._begin + at % self._size
        self._memory[begin : begin + length] = body
        self._written = at + length
        return at

    def take(self, reader: int, offset: int, length: int, decode: Callable[[memoryview], Any]) -> Any:
        """What `decode` makes of a body, after which the reader needs it no more."""
        begin = self._begin + offset % self._size
        with memoryview(self._memory) as whole, whole[begin : begin + length] as body:
            value = decode(body)
        COUNTER.pack_into(self._memory, reader * COUNTER.size, offset + length)
        return value

    def _read(self, reader: int) -> int:
        count: int = COUNTER.unpack_from(self._memory, reader * COUNTER.size)[0]
        return count


@dataclass(slots=True)
class _Peer:
    """A connection at the executor's end."""

    socket: socket.socket
    hello: Hello | None = None
    buffer: bytearray = field(default_factory=bytearray)


class Hub:
    """The executor's end. `send` may be called from one thread at a time for each kind of connection."""

    def __init__(
        self,
        size: int,
        on_message: Callable[[int, FromRank], None],
        on_lost: Callable[[int, str], None],
        bind: tuple[str, int] | None = None,
        secret: str | None = None,
    ) -> None:
        """Listens for `size` ranks, on this machine and, with `bind`, at that address of the network.

        `secret` is what ranks were told by other means than `address`, which has a fresh one else.

        Both callbacks come from the hub's own thread; `on_lost` at most once a rank, and not after `close`.

        Raises:
            OSError: the address cannot be bound.
        """
        self.size = size
        self._on_message, self._on_lost = on_message, on_lost
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._encoder = msgspec.msgpack.Encoder()
        self._ranks: dict[tuple[int, bool], socket.socket] = {}
        self._sharing: list[int] = []
        self._changed = threading.Condition()
        self._closing = False
        self._lost: set[int] = set()
        self._folder = tempfile.mkdtemp(prefix=f"rllm-{os.getpid()}-ranks-")
        ring = _Ring.create(size)
        self._ring = None if ring is None else ring[0]
        self._secret = secret or secrets.token_hex(32)
        self._selector = selectors.DefaultSelector()
        path = str(Path(self._folder, "ranks"))
        local = socket.socket(socket.AF_UNIX)
        local.bind(path)
        self._listeners = [local]
        host, port = "", 0
        try:
            if bind is not None:
                network = socket.create_server(bind)
                self._listeners.append(network)
                host, port = network.getsockname()[:2]
        except OSError:
            local.close()
            raise
        self.address = LinkAddress(
            secret=self._secret, path=path, ring=None if ring is None else ring[1], host=host, port=port
        )
        self._wake, self._woken = socket.socketpair()
        for listener in self._listeners:
            listener.listen(2 * size + 8)
            self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="rllm-ranks", daemon=True)
        self._thread.start()

    def wait_complete(self, seconds: float, check: Callable[[], None]) -> bool:
        """Wait until every rank has come; False if that takes longer. `check` is called meanwhile, and may raise."""
        end = time.monotonic() + seconds
        with self._changed:
            while len(self._ranks) < 2 * self.size:
                check()
                if time.monotonic() > end:
                    return False
                self._changed.wait(0.1)
        self._wake.send(b"x")
        return True

    def send(self, message: ToRank, ranks: Sequence[int], aside: bool = False) -> None:
        """Send a message to some ranks. Those that are gone are passed over: `on_lost` tells of them."""
        body = self._encoder.encode(message)
        offset = None
        near = [] if aside else [rank for rank in ranks if rank in self._sharing]
        if near and self._ring is not None:
            # Those that are not to read it must not hold its place back.
            offset = self._ring.write(body, self._sharing)
        for rank in ranks:
            peer = self._ranks.get((rank, aside))
            if peer is None:
                continue
            with suppress(OSError):
                if offset is not None and rank in near:
                    peer.sendall(HEADER.pack(SHARED, len(body), offset))
                else:
                    peer.sendall(HEADER.pack(INLINE, len(body), 0) + body)

    def close(self) -> None:
        """End all connections and the thread. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _stop_listening(self) -> None:
        """Once everybody has come: then nothing on the disk has a name any more."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = []
        for name in (self.address.path, self.address.ring):
            if name is not None:
                Path(name).unlink(missing_ok=True)
        with suppress(OSError):
            Path(self._folder).rmdir()

    def _run(self) -> None:
        peers: dict[socket.socket, _Peer] = {}
        try:
            while not self._closing:
                for key, _ in self._selector.select():
                    at = key.fileobj
                    assert isinstance(at, socket.socket)
                    if at is self._woken:
                        self._woken.recv(1)
                        self._stop_listening()
                    elif at in self._listeners:
                        self._accept(at, peers)
                    elif at in peers:
                        self._receive(peers[at], peers)
        finally:
            for peer in peers.values():
                peer.socket.close()
            self._stop_listening()
            self._selector.close()
            self._wake.close()
            self._woken.close()

    def _accept(self, listener: socket.socket, peers: dict[socket.socket, _Peer]) -> None:
        peer, _ = listener.accept()
        if peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peers[peer] = _Peer(peer)
        self._selector.register(peer, selectors.EVENT_READ)

    def _receive(self, peer: _Peer, peers: dict[socket.socket, _Peer]) -> None:
        try:
            data = peer.socket.recv(1 << 20)
            if not data:
                raise LinkError("its connection was closed")
            peer.buffer += data
            while (body := self._next_body(peer)) is not None:
                message = self._decoder.decode(body)
                if peer.hello is None:
                    self._greet(peer, message)
                else:
                    self._on_message(peer.hello.rank, message)
        except (OSError, LinkError, msgspec.DecodeError) as error:
            self._selector.unregister(peer.socket)
            del peers[peer.socket]
            peer.socket.close()
            if peer.hello is not None and not self._closing and peer.hello.rank not in self._lost:
                self._lost.add(peer.hello.rank)
                self._on_lost(peer.hello.rank, str(error))

    def _next_body(self, peer: _Peer) -> bytes | None:
        if len(peer.buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(peer.buffer)
        if length > (MAX_FRAME if peer.hello is not None else MAX_HELLO):
            raise LinkError(f"a frame of {length} bytes")
        end = LENGTH.size + length
        if len(peer.buffer) < end:
            return None
        body = bytes(peer.buffer[LENGTH.size : end])
        del peer.buffer[:end]
        return body

    def _greet(self, peer: _Peer, hello: FromRank) -> None:
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
            raise LinkError("no hello with the secret")
        if not 0 <= hello.rank < self.size or (hello.rank, hello.aside) in self._ranks:
            raise LinkError(f"no place for rank {hello.rank}")
        peer.hello = hello
        with self._changed:
            if hello.shares_memory and not hello.aside:
                self._sharing = [*self._sharing, hello.rank]
            self._ranks[hello.rank, hello.aside] = peer.socket
            self._changed.notify_all()


class Link:
    """A rank's end of one of its connections. Sending is thread-safe; `receive` is for one thread."""

    def __init__(self, address: LinkAddress, rank: int, size: int, *, aside: bool, patience_s: float = 0.0) -> None:
        """Connect, trying for `patience_s`.

        Raises:
            LinkError: the executor cannot be reached.
        """
        self._rank = rank
        self._ring: _Ring | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToRank)
        self._lock = threading.Lock()
        self._header = bytearray(HEADER.size)
        self._socket = _connected(address, time.monotonic() + patience_s)
        if address.ring is not None and not aside:
            with suppress(OSError):
                self._ring = _Ring.open(address.ring, size)
        self.send(Hello(address.secret, rank, aside, self._ring is not None, os.getpid()))

    def send(self, message: FromRank) -> None:
        """Send a message.

        Raises:
            LinkError: the executor is gone.
        """
        body = self._encoder.encode(message)
        try:
            with self._lock:
                self._socket.sendall(LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise LinkError(str(error)) from error

    def receive(self) -> ToRank:
        """Wait for the next message.

        Raises:
            LinkError: the executor is gone.
        """
        self._fill(memoryview(self._header))
        kind, length, offset = HEADER.unpack(self._header)
        try:
            if kind == SHARED:
                assert self._ring is not None
                message: ToRank = self._ring.take(self._rank, offset, length, self._decoder.decode)
                return message
            body = bytearray(length)
            self._fill(memoryview(body))
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise LinkError(str(error)) from error

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _fill(self, into: memoryview) -> None:
        while into:
            try:
                count = self._socket.recv_into(into)
            except OSError as error:
                raise LinkError(str(error)) from error
            if not count:
                raise LinkError("the engine is gone")
            into = into[count:]


def _connected(address: LinkAddress, end: float) -> socket.socket:
    while True:
        try:
            if address.path is not None and Path(address.path).exists():
                found = socket.socket(socket.AF_UNIX)
                found.connect(address.path)
                return found
            found = socket.create_connection((address.host, address.port), timeout=max(1.0, end - time.monotonic()))
            found.settimeout(None)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found
        except OSError as error:
            if time.monotonic() > end:
                place = f"{address.host}:{address.port}"
                raise LinkError(f"the engine cannot be reached at {place}: {error}") from error
            time.sleep(RETRY_S)
