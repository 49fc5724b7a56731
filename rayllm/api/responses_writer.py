"""Writes answers of the responses API: parts of a chat are output items."""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rayllm.api.answer import encode
from rayllm.api.chat import BegunChat
from rayllm.api.choice import Choice, Piece
from rayllm.api.errors import ErrorReply
from rayllm.api.hosted import Hosted
from rayllm.api.parts import Change, Part, Parts
from rayllm.api.responses_request import ResponsesRequest, seal
from rayllm.api.tool_servers import ToolOutput
from rayllm.api.tool_turns import CallDone

Json = dict[str, Any]

_CUT: Mapping[str | None, str | None] = {"length": "max_output_tokens", "abort": None}
_PREFIXES = {"text": "msg", "reasoning": "rs", "tool_call": "fc"}
_HOSTED_PREFIXES = {"mcp": "mcp", "code_interpreter": "ci", "web_search": "ws"}


class ResponseWriter:
    """Writes one response."""

    def __init__(
        self,
        begun: BegunChat,
        request: ResponsesRequest,
        echoed: Json,
        ended: Callable[[Json], None],
        hosted: Mapping[str, Hosted] | None = None,
        told: Sequence[str] = (),
    ) -> None:
        """`echoed` are fields of the request that the response repeats; `ended` gets the response when it is whole.

        `hosted` are the tools that run here, by name; those of the servers with labels in `told` need not be listed.
        """
        self.chat, self._ended = begun, ended
        self._hosted = hosted or {}
        self._outputs: dict[int, ToolOutput] = {}
        self._turn = 0
        """Parts of earlier turns."""
        self._over = False
        labels = dict.fromkeys(one.label for one in self._hosted.values() if one.kind == "mcp")
        self._lists = [
            self._list(label, f"mcpl_{begun.id.partition('_')[2]}_{i}")
            for i, label in enumerate(labels) if label not in told
        ]  # fmt: skip
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
        events = self._event("response.created", response=response)
        events += self._event("response.in_progress", response=response)
        for i, one in enumerate(self._lists):
            place = {"output_index": i, "item_id": one["id"]}
            events += self._event("response.output_item.added", output_index=i, item={**one, "tools": []})
            events += self._event("response.mcp_list_tools.in_progress", **place)
            events += self._event("response.mcp_list_tools.completed", **place)
            events += self._event("response.output_item.done", output_index=i, item=one)
        return events

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """Events of the items that a piece adds to."""
        if isinstance(piece, CallDone):
            return self._answered(piece)
        return b"".join(map(self._change, self._parts.read(self.chat.writer.event(choice, piece))))

    def closing(self) -> bytes:
        """The whole response."""
        self._over = True
        events = b"".join(self._item_done(part) for part in self._parts.all if self._is_open(part))
        response = self.end()
        return events + self._event(f"response.{response['status']}", response=response)

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """The whole response."""
        self._parts.read_whole(self.chat.writer.whole(pieces))
        return self.end()

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
            "output": self.output(),
            "usage": None if status == "in_progress" else self._usage(),
        }

    def output(self) -> list[Json]:
        """The items so far."""
        return [*self._lists, *(self._item(part, _status(part, self._parts)) for part in self._parts.all)]

    def open_calls(self) -> list[Part] | None:
        """The calls of this turn that are to be made here; None if the answer is complete without them."""
        calls = [part for part in self._parts.all[self._turn :] if part.kind == "tool_call"]
        if self._parts.finish_reason in _CUT or not calls:
            return None
        here = [part for part in calls if self._is_open(part)]
        return here or (None if any(part.name not in self._hosted for part in calls) else [])

    def next_turn(self) -> None:
        """What comes now is the answer to the outputs of tools."""
        self._turn = len(self._parts.all)
        self._parts.finish_reason = None

    def cut(self) -> None:
        """There are no tokens left for another turn."""
        self._parts.finish_reason = "length"

    def end(self) -> Json:
        """The whole response, which is kept."""
        self._over = True
        cut = self._parts.finish_reason in _CUT
        response = self.response("incomplete" if cut else "completed")
        self._ended(response)
        return response

    def _usage(self) -> Json:
        usage = self.chat.usage.now()
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
        hosted = self._hosted.get(part.name)
        prefix = _PREFIXES[part.kind] if hosted is None else _HOSTED_PREFIXES[hosted.kind]
        return f"{prefix}_{self.chat.id.partition('_')[2]}_{part.index}"

    def _place(self, part: Part) -> int:
        return part.index + len(self._lists)

    def _is_open(self, part: Part) -> bool:
        return part.name in self._hosted and part.index not in self._outputs

    def _list(self, label: str, id_: str) -> Json:
        tools = [
            {"name": one.tool.name, "description": one.tool.description, "input_schema": one.tool.schema,
             "annotations": None}
            for one in self._hosted.values() if one.label == label
        ]  # fmt: skip
        return {"type": "mcp_list_tools", "id": id_, "server_label": label, "tools": tools, "error": None}

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
            case "tool_call" if part.name in self._hosted:
                return self._hosted_item(part, status)
            case "tool_call":
                return {"type": "function_call", "id": self._id(part), "status": status, "call_id": part.call_id,
                        "name": part.name, "arguments": part.text}  # fmt: skip

    def _change(self, change: Change) -> bytes:
        part = change.part
        place = {"item_id": self._id(part), "output_index": self._place(part)}
        if part.name in self._hosted:
            return self._hosted_change(change, place)
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
        added = self._added(part)
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
        return done + self._item_done(part)

    def _added(self, part: Part) -> bytes:
        item = self._item(part, "in_progress")
        return self._event("response.output_item.added", output_index=self._place(part), item=item)

    def _item_done(self, part: Part) -> bytes:
        item = self._item(part, _status(part, self._parts))
        return self._event("response.output_item.done", output_index=self._place(part), item=item)

    # -- calls that are made here

    def _hosted_item(self, part: Part, status: str) -> Json:
        hosted, output = self._hosted[part.name], self._outputs.get(part.index)
        if output is None:
            status = "incomplete" if self._over else "in_progress"
        elif output.failed:
            status = "failed"
        text = None if output is None else output.text
        item: Json = {"type": f"{hosted.kind}_call", "id": self._id(part), "status": status}
        match hosted.kind:
            case "mcp":
                failed = output is not None and output.failed
                return {**item, "name": part.name, "server_label": hosted.label, "arguments": part.text,
                        "output": None if failed else text, "error": text if failed else None,
                        "approval_request_id": None}  # fmt: skip
            case "code_interpreter":
                logs = None if text is None else [{"type": "logs", "logs": text}]
                return {**item, "code": _argument(part.text, "code"), "container_id": hosted.label, "outputs": logs,
                        "name": part.name}  # fmt: skip
            case "web_search":
                action = {"type": "search", "query": _argument(part.text, "query")}
                return {**item, "action": action, "output": text, "name": part.name}

    def _hosted_change(self, change: Change, place: Json) -> bytes:
        part, kind = change.part, self._hosted[change.part.name].kind
        match change.what, kind:
            case "begin", _:
                return self._added(part) + self._event(f"response.{kind}_call.in_progress", **place)
            case "more", "mcp":
                return self._event("response.mcp_call_arguments.delta", **place, delta=change.text)
            case "end", "mcp":
                return self._event("response.mcp_call_arguments.done", **place, arguments=part.text)
            case "end", "code_interpreter":
                code = _argument(part.text, "code")
                return (
                    self._event("response.code_interpreter_call_code.delta", **place, delta=code)
                    + self._event("response.code_interpreter_call_code.done", **place, code=code)
                    + self._event("response.code_interpreter_call.interpreting", **place)
                )
            case "end", "web_search":
                return self._event("response.web_search_call.searching", **place)
        return b""

    def _answered(self, piece: CallDone) -> bytes:
        part, output = piece.call, piece.output
        assert part is not None
        assert output is not None
        self._outputs[part.index] = output
        kind = self._hosted[part.name].kind
        what = "failed" if output.failed and kind == "mcp" else "completed"
        place = {"item_id": self._id(part), "output_index": self._place(part)}
        return self._event(f"response.{kind}_call.{what}", **place) + self._item_done(part)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = encode({"type": kind, "sequence_number": next(self._numbers), **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _argument(text: str, name: str) -> str:
    """One of a call's arguments, which is a text; else all of them."""
    try:
        value = json.loads(text)[name]
    except (ValueError, RecursionError, LookupError, TypeError):
        return text
    return value if isinstance(value, str) else text


def _content(part: Part) -> Json:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": part.logprobs}


def _status(part: Part, parts: Parts) -> str:
    """The last item of an answer that was cut is incomplete."""
    return "incomplete" if parts.finish_reason in _CUT and part is parts.all[-1] else "completed"
