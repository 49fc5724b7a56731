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
        self._in_head = False
        self._received = 0
        """Bytes of an unfinished head, without those that came together with its first."""
        self._refusal: str | None = None

    def connection_made(self, transport: Any) -> None:
        """Called by the event loop."""
        super().connection_made(transport)
        self.logger.debug("connection from %s", self.client)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._in_head:
            self._received += len(data)
        super().data_received(data)
        if self._in_head and self._refusal is None and self._too_much(self._received):
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._in_head, self._received = True, 0

    def on_headers_complete(self) -> None:
        """Called by the parser, which answers an exception by `send_400_response`."""
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(value) + SEPARATORS for name, value in self.headers)
        if self._too_much(size):
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

    def _too_much(self, size: int) -> bool:
        if size > self._max_head_bytes:
            self._refusal = f"the head of the request is larger than {self._max_head_bytes} bytes"
        elif len(self.headers) > self._max_headers:
            self._refusal = f"the request has more than {self._max_headers} headers"
        return self._refusal is not None
