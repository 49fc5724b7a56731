"""Middleware as plain ASGI callables."""

import hmac
import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware

from rayllm.api.call import Call, Message, Receive, Scope, Send, new_id
from rayllm.api.errors import ErrorReply
from rayllm.errors import ConfigError

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RootPath:
    """Tells the app under which path a proxy shows it; requests with and without that prefix are routed alike."""

    def __init__(self, app: App, root_path: str) -> None:
        self._app, self._root_path = app, root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http":
            scope = {**scope, "root_path": self._root_path}
        await self._app(scope, receive, send)


_GUARDED = (
    "/v1",
    "/inference",
    "/collective_rpc",
    "/is_paused",
    "/is_scaling_elastic_ep",
    "/pause",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/server_info",
)


class RequestId:
    """Gives every response an `X-Request-Id`: the request's own, or a new one, of which ids in the answer are made."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its response back."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = b"x-request-id"
        own = next((header for header in scope["headers"] if header[0] == name), None)
        header = own or (name, new_id(None).encode())
        if own is None:
            scope = {**scope, "headers": [*scope["headers"], header]}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class RequireKey:
    """Lets only requests with one of the API keys to the paths that ask the model; the other paths are open."""

    def __init__(self, app: App, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401."""
        if scope["type"] == "http" and self._guarded(scope):
            call = Call(scope, receive, send)
            if not (self._allowed(call.header("authorization") or "") or self._known(call.header("x-api-key") or "")):
                message = "an API key is needed; send the header Authorization: Bearer KEY, or X-Api-Key: KEY"
                headers = {"WWW-Authenticate": "Bearer"}
                reply = ErrorReply(401, message, code="invalid_api_key", headers=headers)
                if _routed_path(scope).startswith("/v1/messages"):
                    await call.json({**reply.anthropic_body(), "request_id": call.id}, 401, headers)
                else:
                    await call.error(reply)
                return
        await self._app(scope, receive, send)

    def _guarded(self, scope: Scope) -> bool:
        # Browsers ask by OPTIONS, without credentials, whether they may send them.
        return scope["method"] != "OPTIONS" and _routed_path(scope).startswith(_GUARDED)

    def _allowed(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        return self._known(key) and scheme.lower() == "bearer"

    def _known(self, key: str) -> bool:
        given = key.strip().encode()
        # Every key is compared, so that the time taken does not tell which one came near.
        matches = [hmac.compare_digest(given, own) for own in self._keys]
        return any(matches)


def _routed_path(scope: Scope) -> str:
    """The path as the router sees it, without the prefix under which the app is mounted."""
    path, root = scope["path"], scope.get("root_path", "")
    rest: str = path.removeprefix(root)
    return rest if rest.startswith("/") else path


def import_middleware(path: str) -> Middleware:
    """The middleware at an import path, `package.module.name`: an ASGI class, or an async function as FastAPI has it.

    Raises:
        ConfigError: it cannot be imported, is neither, or is a class that wants more than the app.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises
        cure = "write package.module.name, and have its folder in PYTHONPATH"
        raise ConfigError("--middleware", f"{path!r} cannot be imported ({error})", cure) from error
    if inspect.isclass(found):
        try:
            inspect.signature(found).bind(None)
        except TypeError as error:
            raise ConfigError("--middleware", f"{path!r} cannot be made from an app alone ({error})") from None
        return Middleware(cast(Any, found))
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    raise ConfigError("--middleware", f"{path!r} is neither a class nor an async function")
