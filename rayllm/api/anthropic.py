"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, as Anthropic has them, answered by way of chat."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from rayllm.api.answer import answer, encode
from rayllm.api.anthropic_request import NAMES, REFUSED, CountTokensRequest, MessagesRequest, chat_fields
from rayllm.api.call import Call, ClientLeft
from rayllm.api.chat import BegunChat, Chat
from rayllm.api.choice import Choice, Piece
from rayllm.api.errors import ErrorReply
from rayllm.api.front import Front
from rayllm.api.generate import Rendering
from rayllm.api.parse import parse_fields, parse_request
from rayllm.api.parts import Change, Part, Parts
from rayllm.api.wire import ChatRequest
from rayllm.errors import RequestError

Json = dict[str, Any]
R = TypeVar("R", bound=CountTokensRequest)

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    """Answers Anthropic's requests."""

    def __init__(self, front: Front, chat: Chat, rendering: Rendering) -> None:
        self._front, self._chat, self._rendering = front, chat, rendering
        self._thinks = front.renderer.has_variable("enable_thinking")

    async def create(self, call: Call) -> None:
        """Answer a conversation."""
        await _with_errors(call, self._create)

    async def count_tokens(self, call: Call) -> None:
        """How many tokens a conversation has."""
        await _with_errors(call, self._count)

    async def render(self, call: Call) -> None:
        """A conversation as a request of `/inference/v1/generate`."""
        await _with_errors(call, self._render)

    async def _render(self, call: Call) -> None:
        request = await self._parse(MessagesRequest, call)
        await self._rendering.render(call, self._chat_request(request))

    async def _create(self, call: Call) -> None:
        request = await self._parse(MessagesRequest, call)
        await call.while_connected(self._answer(call, request))

    async def _answer(self, call: Call, request: MessagesRequest) -> None:
        begun = await self._chat.begin(call, self._chat_request(request), "msg_")
        writer = MessagesWriter(begun)
        await answer(call, begun.choices, writer, bool(request.stream), writer.failed)

    async def _count(self, call: Call) -> None:
        request = await self._parse(CountTokensRequest, call)
        self._front.check_model(request)
        ids = await call.while_connected(self._chat.render(self._chat_request(request)))
        await call.json({"input_tokens": len(ids)})

    async def _parse(self, kind: type[R], call: Call) -> R:
        return parse_request(kind, await call.body(self._front.settings.max_body_bytes), REFUSED)

    def _chat_request(self, request: CountTokensRequest) -> ChatRequest:
        return parse_fields(ChatRequest, chat_fields(request, self._thinks))


class MessagesWriter:
    """Writes messages: parts of a chat are content blocks."""

    def __init__(self, begun: BegunChat) -> None:
        self._chat, self._parts = begun, Parts()

    def opening(self) -> bytes:
        """The message without content."""
        return _event("message_start", message={**self._message([]), "stop_reason": None, "stop_sequence": None})

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """Events of the blocks that a piece adds to."""
        return b"".join(map(_change, self._parts.read(self._chat.writer.event(choice, piece))))

    def closing(self) -> bytes:
        """Why the message ended, and its usage."""
        return _event("message_delta", delta=self._stop(), usage=self._usage()) + _event("message_stop")

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """The whole message."""
        self._parts.read_whole(self._chat.writer.whole(pieces))
        return {**self._message(list(map(_block, self._parts.all))), **self._stop()}

    def failed(self, error: ErrorReply) -> bytes:
        """The end of a stream that an error cuts."""
        return b"event: error\ndata: " + encode(error.anthropic_body()) + b"\n\n"

    def _message(self, content: list[Json]) -> Json:
        chat = self._chat
        head = {"id": chat.id, "type": "message", "role": "assistant", "model": chat.model}
        return {**head, "content": content, "usage": self._usage()}

    def _stop(self) -> Json:
        reason, sequence = self._parts.finish_reason, self._parts.stop_reason
        if reason == "stop" and isinstance(sequence, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        if reason == "stop" and self._parts.all and _is_whole_call(self._parts.all[-1]):
            reason = "tool_calls"  # of a named function, which chat completions tell as a stop
        return {"stop_reason": _STOP_REASONS.get(reason or "stop", "end_turn"), "stop_sequence": None}

    def _usage(self) -> Json:
        """Prompt tokens from the cache are counted apart, where the server tells of them at all."""
        usage = self._chat.usage.now()
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }


async def _with_errors(call: Call, handle: Callable[[Call], Awaitable[None]]) -> None:
    """Handle a request, and write its error as Anthropic does."""
    try:
        await handle(call)
    except ClientLeft:
        raise
    except Exception as e:
        if call.started:
            raise
        reply = call.reply_to(e.renamed(NAMES) if isinstance(e, RequestError) else e)
        await call.json({**reply.anthropic_body(), "request_id": call.id}, reply.status, reply.headers)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def _change(change: Change) -> bytes:
    part = change.part
    match change.what:
        case "begin":
            return _event("content_block_start", index=part.index, content_block=_block(part))
        case "end":
            return _event("content_block_stop", index=part.index)
    match part.kind:
        case "text":
            delta = {"type": "text_delta", "text": change.text}
        case "reasoning":
            delta = {"type": "thinking_delta", "thinking": change.text}
        case "tool_call":
            delta = {"type": "input_json_delta", "partial_json": change.text}
    return _event("content_block_delta", index=part.index, delta=delta)


def _block(part: Part) -> Json:
    """A part as a content block; one that has just begun is empty."""
    match part.kind:
        case "text":
            return {"type": "text", "text": part.text}
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case "tool_call":
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _input(part.text)}


def _is_whole_call(part: Part) -> bool:
    try:
        return part.kind == "tool_call" and isinstance(msgspec.json.decode(part.text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _input(arguments: str) -> Json:
    """The arguments of a tool call; of those that the model left unfinished, nothing."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
