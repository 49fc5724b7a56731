"""Frames on a session's socket: four bytes of length (big endian), then a msgpack list of messages. Never pickle.

Both ends bound the length of a frame and close the connection on the first byte that is not theirs.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import msgspec

M = TypeVar("M")
HEADER = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Sizes in bytes and times in seconds that both ends of a session hold each other to."""

    max_frame: int = 64 * 2**20
    max_hello: int = 4096
    """Longest frame from someone who has not shown the secret."""
    hello_s: float = 5.0
    """Time in which a new connection must show it."""
    ping_s: float = 2.0
    """Pause between heartbeats, which the ingress sends."""
    silence_s: float = 12.0
    """Either end gives up a peer that was silent for so long."""
    write_buffer: int = 16 * 2**20
    """A reader that leaves more than this unread is dropped."""
    watch_s: float = 0.5
    """How often the engine side looks whether its engine is alive."""
    step_s: float = 300.0
    """A step that runs longer means a hung engine."""
    retry_s: float = 0.25
    """First pause before a session is opened again; doubles up to twenty times that."""
    open_s: float = 30.0
    """Time for the call that opens a session."""
    admit_wait_s: float = 10.0
    """How long a new request waits for an engine while there is none."""
    replica_wait_s: float = 60.0
    """How long a request whose engine is gone waits for another."""


class WireError(Exception):
    """What came is not a frame of this protocol."""


def encode(message: Any) -> msgspec.Raw:
    """A message as it stands in a frame, for those who must know its size."""
    return msgspec.Raw(msgspec.msgpack.encode(message))


def encode_frame(messages: Sequence[Any]) -> bytes:
    """One frame with these messages, encoded or not."""
    body = msgspec.msgpack.encode(messages)
    return HEADER.pack(len(body)) + body


class FrameProtocol(asyncio.Protocol, Generic[M]):
    """One connection. `on_frame` gets each list of messages, `on_lost` the reason of the end, once.

    An exception of class `WireError` out of `on_frame` ends the connection like a bad frame.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[list[M]],
        on_frame: Callable[["FrameProtocol[M]", list[M]], None],
        on_lost: Callable[["FrameProtocol[M]", str], None],
        max_frame: int,
    ) -> None:
        self.max_frame = max_frame
        self.transport: asyncio.Transport | None = None
        self.last_heard = 0.0
        """On the event loop's clock."""
        self._loop = asyncio.get_running_loop()
        self._decoder = decoder
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._reason = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are so in all but name
        self.last_heard = self._loop.time()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop: cut the bytes into frames."""
        self.last_heard = self._loop.time()
        self._buffer += data
        try:
            while (body := self._next_body()) is not None:
                self._on_frame(self, self._decoder.decode(body))
        except (WireError, msgspec.DecodeError) as error:
            self.close(f"bad frame: {error}")

    def _next_body(self) -> bytes | None:
        if len(self._buffer) < HEADER.size or self._reason:
            return None
        (length,) = HEADER.unpack_from(self._buffer)
        if length > self.max_frame:
            raise WireError(f"{length} bytes are over the limit of {self.max_frame}")
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return body

    def send(self, messages: Sequence[Any]) -> None:
        """Queue one frame. Nothing happens on a connection that is closing."""
        self.send_frame(encode_frame(messages))

    def send_frame(self, frame: bytes) -> None:
        """Queue one frame that is encoded already."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(frame)

    @property
    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def close(self, reason: str, *, flush: bool = False) -> None:
        """End the connection, at once or after what is queued."""
        self._reason = self._reason or reason
        if self.transport is not None:
            self.transport.close() if flush else self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop, once."""
        self._buffer.clear()
        self._on_lost(self, self._reason or (f"connection lost: {exc}" if exc else "closed by the other end"))
