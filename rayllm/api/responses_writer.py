"""Writes answers of the responses API: parts of a chat are output items."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rayllm.api.answer import encode
from rayllm.api.chat import BegunChat
from rayllm.api.choice import Choice, Piece
from rayllm.api.errors import ErrorReply
from rayllm.api.parts import Change, Part, Parts
from rayllm.api.responses_request import ResponsesRequest, seal

Json = dict[str, Any]

_CUT: Mapping[str | None, str | None] = {"length": "max_output_tokens", "abort": None}
_PREFIXES = {"text": "msg", "reasoning": "rs", "tool_call": "fc"}


class ResponseWriter:
    """Writes one response."""

    def __init__(
        self, begun: BegunChat, request: ResponsesRequest, echoed: Json, ended: Callable[[Json], None]
    ) -> None:
        """`echoed` are fields of the request that the response repeats; `ended` gets the response when it is whole."""
        self._chat, self._ended = begun, ended
        self._parts = Parts()
        self._sealed = "reasoning.encrypted_content" in (request.include or ())
        self._numbers = itertools.count()
        self._base = {
            "id": begun.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": begun.model,
            **echoed,
        }
        self._error: Json | None = None

    def opening(self) -> bytes:
        """The response without output."""
        response = self.response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """Events of the items that a piece adds to."""
        return b"".join(map(self._change, self._parts.read(self._chat.writer.event(choice, piece))))

    def closing(self) -> bytes:
        """The whole response."""
        response = self._end()
        return self._event(f"response.{response['status']}", response=response)

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """The whole response."""
        self._parts.read_whole(self._chat.writer.whole(pieces))
        return self._end()

    def failed(self, error: ErrorReply) -> bytes:
        """The end of a stream that an error cuts."""
        self._error = {"code": "server_error", "message": error.message}
        response = self.response("failed")
        self._ended(response)
        return self._event("response.failed", response=response)

    def response(self, status: str) -> Json:
        """The response as it is now."""
        return {
            **self._base,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": self._error,
            "incomplete_details": {"reason": _CUT[self._parts.finish_reason]} if status == "incomplete" else None,
            "output": [self._item(part, _status(part, self._parts)) for part in self._parts.all],
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _end(self) -> Json:
        cut = self._parts.finish_reason in _CUT
        response = self.response("incomplete" if cut else "completed")
        self._ended(response)
        return response

    def _usage(self) -> Json:
        usage = self._chat.usage.now()
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }

    # -- items

    def _id(self, part: Part) -> str:
        return f"{_PREFIXES[part.kind]}_{self._chat.id.partition('_')[2]}_{part.index}"

    def _item(self, part: Part, status: str) -> Json:
        match part.kind:
            case "text":
                content = [] if status == "in_progress" else [_content(part)]
                return {"type": "message", "id": self._id(part), "status": status, "role": "assistant",
                        "content": content}  # fmt: skip
            case "reasoning":
                content = [] if status == "in_progress" else [_content(part)]
                sealed = seal(part.text) if self._sealed and content else None
                return {"type": "reasoning", "id": self._id(part), "status": status, "summary": [],
                        "content": content, "encrypted_content": sealed}  # fmt: skip
            case "tool_call":
                return {"type": "function_call", "id": self._id(part), "status": status, "call_id": part.call_id,
                        "name": part.name, "arguments": part.text}  # fmt: skip

    def _change(self, change: Change) -> bytes:
        part = change.part
        place = {"item_id": self._id(part), "output_index": part.index}
        if part.kind != "tool_call":
            place["content_index"] = 0
        match change.what:
            case "begin":
                return self._begun(part, place)
            case "more":
                return self._more(change, place)
            case "end":
                return self._done(part, place)

    def _begun(self, part: Part, place: Json) -> bytes:
        added = self._event("response.output_item.added", output_index=part.index, item=self._item(part, "in_progress"))
        if part.kind == "tool_call":
            return added
        return added + self._event("response.content_part.added", **place, part=_content(part))

    def _more(self, change: Change, place: Json) -> bytes:
        match change.part.kind:
            case "text":
                kind, more = "response.output_text.delta", {"logprobs": change.logprobs}
            case "reasoning":
                kind, more = "response.reasoning_text.delta", {}
            case "tool_call":
                kind, more = "response.function_call_arguments.delta", {}
        return self._event(kind, **place, delta=change.text, **more)

    def _done(self, part: Part, place: Json) -> bytes:
        match part.kind:
            case "text":
                done = self._event("response.output_text.done", **place, text=part.text, logprobs=part.logprobs)
            case "reasoning":
                done = self._event("response.reasoning_text.done", **place, text=part.text)
            case "tool_call":
                done = self._event(
                    "response.function_call_arguments.done", **place, name=part.name, arguments=part.text
                )
        if part.kind != "tool_call":
            done += self._event("response.content_part.done", **place, part=_content(part))
        item = self._item(part, _status(part, self._parts))
        return done + self._event("response.output_item.done", output_index=part.index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = encode({"type": kind, "sequence_number": next(self._numbers), **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _content(part: Part) -> Json:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": part.logprobs}


def _status(part: Part, parts: Parts) -> str:
    """The last item of an answer that was cut is incomplete."""
    return "incomplete" if parts.finish_reason in _CUT and part is parts.all[-1] else "completed"
