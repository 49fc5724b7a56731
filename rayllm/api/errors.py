"""Errors as clients see them: a status, and `{"error": {"message", "type", "param", "code"}}`, or Anthropic's form."""

import http
import logging
from dataclasses import dataclass, field
from typing import Any

from rayllm.errors import EngineDead, GenerationFailed, Overloaded, ReplicaLost, RequestError

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error on its way to a client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """What is sent as JSON."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, other)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The same for clients of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def reply_to(error: BaseException, log_stack: bool = False) -> ErrorReply:
    """What a client is told about an exception, which is logged in a line, or with its stack.

    Of unforeseen ones nothing is shown, and their stack is logged always.
    """
    reply = _foreseen(error)
    if reply is None:
        logger.error("a request failed", exc_info=error)
        return ErrorReply(500, "internal error; the server's log has the details")
    logger.info("answered with %d: %r", reply.status, reply.message, exc_info=error if log_stack else None)
    return reply


def _foreseen(error: BaseException) -> ErrorReply | None:
    if isinstance(error, RequestError):
        return ErrorReply(error.status, error.message, error.param, error.code)
    if isinstance(error, Overloaded):
        retry = {"Retry-After": str(max(1, round(error.retry_after)))}
        return ErrorReply(error.status, error.message, headers=retry)
    if isinstance(error, ReplicaLost):
        return ErrorReply(503, "the engine behind this request is gone; try again", headers={"Retry-After": "1"})
    if isinstance(error, EngineDead):
        return ErrorReply(503, "no engine can serve this request now; try again later", headers={"Retry-After": "5"})
    if isinstance(error, GenerationFailed):
        return ErrorReply(500, str(error))
    return None


def reply_to_status(status: int, detail: str | None = None) -> ErrorReply:
    """The reply to a request that no route takes."""
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = "error"
    return ErrorReply(status, detail or phrase)
