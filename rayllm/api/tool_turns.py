"""The turns of a response whose tools run here: the model calls, the servers answer, the model goes on."""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rayllm.api.chat import BegunChat
from rayllm.api.choice import Choice, Piece
from rayllm.api.hosted import Hosted
from rayllm.api.parts import Part
from rayllm.api.tool_servers import Session, ToolOutput

Json = dict[str, Any]

MOST_TURNS = 16
LONGEST_S = 600.0
"""After so many turns, or so long, the model has to answer without tools."""


@dataclass(slots=True)
class CallDone(Piece):
    """A call of a hosted tool has been answered."""

    call: Part | None = None
    output: ToolOutput | None = None


class ToolTurns(Choice):
    """The choices of all turns, one after the other, as one choice."""

    def __init__(
        self,
        first: BegunChat,
        hosted: Mapping[str, Hosted],
        calls: Callable[[], list[Part] | None],
        go_on: Callable[[int, bool], Awaitable[BegunChat | None]],
        most_calls: int | None,
    ) -> None:
        """`calls` are those that the answer so far has left open, None if it is complete without them; `go_on` begins
        a next turn, given the output tokens so far, and whether tools may be called; `most_calls` limits those of all
        turns.
        """
        self.index = 0
        self._begun = [first]
        self._hosted, self._calls, self._go_on = hosted, calls, go_on
        self._left = most_calls
        self._sessions: dict[str, Session] = {}

    def usage(self) -> Json:
        """That of all turns."""
        return _sum([begun.usage.now() for begun in self._begun])

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces of all turns, with the answers to calls between them."""
        began = time.monotonic()
        for turn in range(1, MOST_TURNS + 2):
            async for piece in self._begun[-1].choices[0].pieces():
                yield piece
            calls = self._calls()
            if not calls:
                return
            for call in calls:
                yield CallDone(call=call, output=await self._run(call))
            if self._calls() is None:
                return
            late = turn >= MOST_TURNS or time.monotonic() - began > LONGEST_S or self._left == 0
            begun = await self._go_on(self.usage()["completion_tokens"], not late)
            if begun is None:
                return
            self._begun.append(begun)

    def close(self) -> None:
        """Stop whatever has not stopped."""
        for begun in self._begun:
            for choice in begun.choices:
                choice.close()
        for session in self._sessions.values():
            session.close()

    async def _run(self, call: Part) -> ToolOutput:
        if self._left == 0:
            return ToolOutput("no more tools can be called in this response: max_tool_calls is reached", failed=True)
        if self._left is not None:
            self._left -= 1
        try:
            arguments = json.loads(call.text or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return ToolOutput("the arguments must be a JSON object", failed=True)
        hosted = self._hosted[call.name]
        session = self._sessions.get(hosted.server.address)
        if session is None:
            session = self._sessions[hosted.server.address] = hosted.server.session()
        return await session.call(hosted.tool.name, arguments)


class TurnsUsage:
    """Counts the tokens of all turns; see `rayllm.api.front.Usage`."""

    def __init__(self, turns: ToolTurns) -> None:
        self._turns = turns

    def now(self) -> Json:
        """The usage so far."""
        return self._turns.usage()


def _sum(usages: list[Json]) -> Json:
    whole: Json = {}
    for usage in usages:
        for name, value in usage.items():
            if isinstance(value, dict):
                whole[name] = _sum([whole.get(name) or {}, value])
            else:
                whole[name] = (whole.get(name) or 0) + value if value is not None else whole.get(name)
    return whole
