"""Middleware as plain ASGI callables."""

import hmac
from collections.abc import Awaitable, Callable, Sequence

from rayllm.api.call import Call, Receive, Scope, Send
from rayllm.api.errors import ErrorReply

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequireKey:
    """Lets only requests with one of the API keys to paths under `/v1`; the other paths are open."""

    def __init__(self, app: App, keys: Sequence[str], root_path: str) -> None:
        self._app, self._prefix = app, f"{root_path}/v1"
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
        path: str = scope["path"]
        return scope["method"] != "OPTIONS" and path.startswith((self._prefix, "/v1"))

    def _allowed(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = key.strip().encode()
        # Every key is compared, so that the time taken does not tell which one came near.
        matches = [hmac.compare_digest(given, own) for own in self._keys]
        return scheme.lower() == "bearer" and any(matches)
