"""A chat's answer as a row of parts (reasoning, text, tool calls), for the APIs that show answers so.

Parts are read from the chunks that chat completions would send, so that whatever chat can do, these APIs can.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Json = dict[str, Any]


@dataclass(slots=True)
class Part:
    """One part of an answer."""

    kind: Literal["reasoning", "text", "tool_call"]
    index: int
    """Its place in the answer."""
    call_id: str = ""
    name: str = ""
    """Of the function that is called."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    """Of a text, as chat completions write them."""

    @property
    def text(self) -> str:
        """The text so far; of a tool call its arguments, as JSON."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to a part: it began, got more text, or ended."""

    what: Literal["begin", "more", "end"]
    part: Part
    text: str = ""
    logprobs: list[Json] = field(default_factory=list)


class Parts:
    """The parts of one choice."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._open: Part | None = None
        self._call: int | None = None

    def read(self, events: bytes) -> Iterator[Change]:
        """What the chunks in these server-sent events change."""
        for event in events.split(b"\n\n"):
            if event.startswith(b"data: {"):
                for choice in msgspec.json.decode(event.removeprefix(b"data: "))["choices"]:
                    yield from self._take(choice, choice["delta"])

    def read_whole(self, body: Json) -> None:
        """Take the body of a whole answer."""
        choice = body["choices"][0]
        for _ in self._take(choice, choice["message"]):
            pass

    def _take(self, choice: Json, message: Json) -> Iterator[Change]:
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            yield from self._more("reasoning", reasoning)
        text = message.get("content")
        if text or (logprobs and self._open is not None and self._open.kind == "text"):
            yield from self._more("text", text or "", logprobs)
        for place, call in enumerate(message.get("tool_calls") or ()):
            yield from self._add_call(call.get("index", place), call)
        if choice["finish_reason"] is not None:
            self.finish_reason, self.stop_reason = choice["finish_reason"], choice["stop_reason"]
            yield from self._end()

    def _add_call(self, number: int, call: Json) -> Iterator[Change]:
        function = call.get("function") or {}
        if self._open is None or self._open.kind != "tool_call" or self._call != number:
            self._call = number
            yield from self._begin(Part("tool_call", len(self.all), call.get("id") or "", function.get("name") or ""))
        if arguments := function.get("arguments"):
            yield from self._more("tool_call", arguments)

    def _more(
        self, kind: Literal["reasoning", "text", "tool_call"], text: str, logprobs: list[Json] | None = None
    ) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Part(kind, len(self.all)))
        assert self._open is not None
        self._open.texts.append(text)
        self._open.logprobs += logprobs or []
        yield Change("more", self._open, text, logprobs or [])

    def _begin(self, part: Part) -> Iterator[Change]:
        yield from self._end()
        self.all.append(part)
        self._open = part
        yield Change("begin", part)

    def _end(self) -> Iterator[Change]:
        if self._open is not None:
            ended, self._open = self._open, None
            yield Change("end", ended)
