"""Middleware as plain ASGI callables."""

import hmac
from collections.abc import Awaitable, Callable, Sequence

from rayllm.api.call import Call, Receive, Scope, Send
from rayllm.api.errors import ErrorReply

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


class RequireKey:
    """Lets only requests with one of the API keys to paths under `/v1`; the other paths are open."""

    def __init__(self, app: App, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401."""
        if scope["type"] == "http" and self._guarded(scope):
            call = Call(scope, receive, send)
            if not self._allowed(call.header("authorization") or ""):
                message = "an API key is needed; send the header Authorization: Bearer KEY"
                headers = {"WWW-Authenticate": "Bearer"}
                await call.error(ErrorReply(401, message, code="invalid_api_key", headers=headers))
                return
        await self._app(scope, receive, send)

    def _guarded(self, scope: Scope) -> bool:
        # Browsers ask by OPTIONS, without credentials, whether they may send them.
        return scope["method"] != "OPTIONS" and _routed_path(scope).startswith("/v1")

    def _allowed(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = key.strip().encode()
        # Every key is compared, so that the time taken does not tell which one came near.
        matches = [hmac.compare_digest(given, own) for own in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def _routed_path(scope: Scope) -> str:
    """The path as the router sees it, without the prefix under which the app is mounted."""
    path, root = scope["path"], scope.get("root_path", "")
    rest: str = path.removeprefix(root)
    return rest if rest.startswith("/") else path
