"""One RPC as a request to the HTTP app in this process: what is behind the door is the same for both ways in."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import msgspec
from grpc import StatusCode
from grpc.aio import ServicerContext

from rayllm.api.call import Message, Scope
from rayllm.api.middleware import App

log = logging.getLogger(__name__)

Json = dict[str, Any]
Context = ServicerContext[Any, Any]

CODES = {
    "invalid_request_error": StatusCode.INVALID_ARGUMENT,
    "authentication_error": StatusCode.UNAUTHENTICATED,
    "not_found_error": StatusCode.NOT_FOUND,
    "rate_limit_error": StatusCode.RESOURCE_EXHAUSTED,
    "service_unavailable": StatusCode.UNAVAILABLE,
    "server_error": StatusCode.INTERNAL,
}
"""By the type of `rayllm.api.errors.ErrorReply`."""
TOO_LARGE = 413
LONGEST_MESSAGE = 800
"""Characters of an error's message, which travels in headers, of which clients take 8 KB."""
DONE = b"data: [DONE]"
OURS = ("content-type", "content-length")
"""Headers that metadata cannot set."""


class Exchange:
    """One request to the app. It ends early where its task is cancelled, which gRPC does when the client leaves."""

    def __init__(self, app: App, context: Context, method: str, path: str, fields: Json | None = None) -> None:
        self._app, self._context = app, context
        self._body = msgspec.json.encode(fields) if fields is not None else b""
        self._scope = _scope(method, path, context)
        self._status = 0
        self._headers: dict[bytes, bytes] = {}

    async def body(self) -> bytes:
        """The whole answer; an error ends the RPC."""
        parts: list[bytes] = []

        async def keep(data: bytes) -> None:
            parts.append(data)

        await self._run(keep)
        body = b"".join(parts)
        if self._status != 200:
            await self._abort(msgspec.json.decode(body)["error"])
        return body

    async def json(self) -> Json:
        """The JSON of the whole answer; an error ends the RPC."""
        answer: Json = msgspec.json.decode(await self.body())
        return answer

    async def events(self, take: Callable[[Json], Awaitable[None]]) -> None:
        """Pass on the events of a stream as they come; an error ends the RPC. Waits while `take` does."""
        errors: list[Json] = []

        async def each(data: bytes) -> None:
            # Writers give whole events, and an error instead of a stream has no event's form.
            for block in data.split(b"\n\n"):
                if block and block != DONE:
                    event = msgspec.json.decode(block.removeprefix(b"data: "))
                    if "error" in event:
                        errors.append(event["error"])
                    else:
                        await take(event)

        await self._run(each)
        if errors:
            await self._abort(errors[0])

    async def _run(self, take: Callable[[bytes], Awaitable[None]]) -> None:
        unread = [self._body]

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status, self._headers = message["status"], dict(message["headers"])
                if (request_id := self._headers.get(b"x-request-id")) is not None:
                    await self._context.send_initial_metadata((("x-request-id", request_id.decode()),))
            else:
                await take(message.get("body", b""))

        try:
            await self._app(self._scope, receive, send)
        except Exception:
            log.exception("a request failed")
            await self._context.abort(StatusCode.INTERNAL, "internal error; the server's log has the details")

    async def _abort(self, error: Json) -> NoReturn:
        code = StatusCode.RESOURCE_EXHAUSTED if self._status == TOO_LARGE else CODES[error["type"]]
        metadata = [(name, error[name]) for name in ("param", "code") if error[name]]
        if (seconds := self._headers.get(b"retry-after")) is not None:
            metadata.append(("retry-after", seconds.decode()))
        await self._context.abort(code, error["message"][:LONGEST_MESSAGE], tuple(metadata))


def _scope(method: str, path: str, context: Context) -> Scope:
    given = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
    headers = [(key.encode(), value.encode("latin-1")) for key, value in given if key not in OURS]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "2",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers, (b"content-type", b"application/json")],
    }
