"""HTTP/1.1 as uvicorn speaks it over httptools, with limits on the head of a request, which httptools lacks."""

from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rayllm.api.errors import reply_to_status

SEPARATORS = 4
"""Bytes of a header line beside its name and value."""


class LimitedHttp(HttpToolsProtocol):
    """One connection. A request with a larger head or more headers than allowed is answered with 431."""

    def __init__(self, max_head_bytes: int, max_headers: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._max_head_bytes, self._max_headers = max_head_bytes, max_headers
        self._chunk = 0
        self._in_head = False
        self._received = 0
        """Bytes from the chunk on in which the head begins, which may hold the end of another request before it."""
        self._before = 0
        """Bytes of that chunk."""
        self._refusal: str | None = None

    def connection_made(self, transport: Any) -> None:
        """Called by the event loop."""
        super().connection_made(transport)
        self.logger.debug("connection from %s", self.client)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._chunk = len(data)
        if self._in_head:
            self._received += self._chunk
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        if self._too_much(self._received - self._before):
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._in_head = True
        self._received = self._before = self._chunk

    def on_headers_complete(self) -> None:
        """Called by the parser, which answers an exception by `send_400_response`."""
        self._in_head = False
        # Few heads come near a limit, and to measure each would cost as much as half of its parsing.
        near = self._received > self._max_head_bytes or len(self.headers) > self._max_headers
        if near and self._too_much(self._head_bytes()):
            raise ValueError(self._refusal)
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what was received, and close the connection."""
        if self._refusal is None:
            super().send_400_response(msg)
            return
        body = msgspec.json.encode(reply_to_status(431, self._refusal).body())
        head = f"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + SEPARATORS for name, value in self.headers)

    def _too_much(self, size: int) -> bool:
        if size > self._max_head_bytes:
            self._refusal = f"the head of the request is larger than {self._max_head_bytes} bytes"
        elif len(self.headers) > self._max_headers:
            self._refusal = f"the request has more than {self._max_headers} headers"
        return self._refusal is not None
