"""One HTTP request over ASGI: reading its body, answering it, and noticing that the client has left."""

import asyncio
import contextlib
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from rayllm.api.errors import ErrorReply, reply_to
from rayllm.errors import RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")

_JSON = (b"content-type", b"application/json")
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._:-]")
_LONGEST_ID = 64


class ClientLeft(Exception):
    """The client closed its connection before it had its answer."""


class BodyTooLarge(RequestError):
    """The body exceeds the limit."""

    status = 413


class NotJson(RequestError):
    """The body is declared as something other than JSON."""

    status = 415


class Call:
    """One HTTP request. Answer it by `json` or by `start_events` and `send_events`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, log_stack: bool = False) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.started = False
        """Whether the status line is out, after which an error cannot have a status of its own."""
        self.id = new_id(self.header("x-request-id"))
        """Unlike any other, whatever the client sends as X-Request-Id."""
        self._log_stack = log_stack

    def header(self, name: str) -> str | None:
        """A header's value."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == wanted), None)

    def query(self) -> dict[str, str]:
        """The last value of each parameter of the URL."""
        pairs = parse_qs(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        return {name: values[-1] for name, values in pairs.items()}

    async def body(self, limit: int) -> bytes:
        """The whole body of at most `limit` bytes.

        Raises:
            RequestError: it is larger, or not declared as JSON.
            ClientLeft: the client went away meanwhile.
        """
        kind = (self.header("content-type") or "application/json").partition(";")[0].strip().lower()
        # A web page may post other types to any server without asking, JSON only with the server's consent (CORS).
        if kind != "application/json" and not kind.endswith("+json"):
            raise NotJson("the body must be JSON; send the header Content-Type: application/json")
        size, parts = 0, []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise BodyTooLarge(f"the body is larger than {limit} bytes")
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Do some work, and cancel it as soon as the client leaves. To be called once the body is read.

        Raises:
            ClientLeft: it left, and the work has ended.
        """
        task, watch = asyncio.ensure_future(work), asyncio.ensure_future(self._left())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientLeft
        finally:
            for each in (task, watch):
                if not each.done():
                    each.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await each

    async def json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Answer with JSON; numbers that JSON cannot write become null."""
        await self.raw(msgspec.json.encode(value), _JSON, status, headers)

    async def raw(
        self, body: bytes, kind: tuple[bytes, bytes], status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Answer with a body of some type."""
        more = [(key.lower().encode(), value.encode()) for key, value in (headers or {}).items()]
        length = (b"content-length", str(len(body)).encode())
        self.started = True
        headers_out = [kind, length, *more]
        await self._send({"type": "http.response.start", "status": status, "headers": headers_out})
        await self._send({"type": "http.response.body", "body": body})

    def reply_to(self, error: Exception) -> ErrorReply:
        """What the client is told about an exception; it is logged."""
        return reply_to(error, self._log_stack)

    async def error(self, error: ErrorReply) -> None:
        """Answer with an error."""
        await self.json(error.body(), error.status, error.headers)

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS]})

    async def send_events(self, data: bytes, last: bool = False) -> None:
        """Send whole events. Waits while the client reads slowly."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Endpoint:
    """An ASGI application that answers each request by one coroutine function, and maps what it raises."""

    def __init__(self, handler: Callable[[Call], Awaitable[None]], log_stack: bool = False) -> None:
        """`log_stack` puts the stacks of errors into the log."""
        self._handler, self._log_stack = handler, log_stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        call = Call(scope, receive, send, self._log_stack)
        try:
            await self._handler(call)
        except ClientLeft:
            pass
        except Exception as e:
            if call.started:
                raise
            await call.error(call.reply_to(e))


def new_id(wanted: str | None) -> str:
    """An id that no other request has; it shows the plain part of what the client asked for."""
    plain = _NOT_PLAIN.sub("", wanted or "")[:_LONGEST_ID]
    unique = uuid.uuid4().hex
    return f"{plain}-{unique[:12]}" if plain else unique
