"""Answers that this process keeps, in bounded memory."""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

from rayllm.api.answer import encode
from rayllm.errors import Overloaded, RequestError

Json = dict[str, Any]

MOST_BYTES = 64 << 20
MOST_RUNNING = 256
_NUMBERS = itertools.count()


class ResponseNotFound(RequestError):
    """There is no such response here."""

    status = 404
    code = "response_not_found"


@dataclass(eq=False, slots=True)
class Kept:
    """A response with the conversation that led to it."""

    response: Json
    items: list[Json]
    """Earlier turns and the input."""
    task: "asyncio.Task[None] | None" = None
    """What makes a background response; it is running until this is done."""
    events: list[bytes] | None = None
    """Of a background response that is streamed: its events so far, at the places that their numbers say."""
    size: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, whenever there is something new."""
    number: int = field(default_factory=_NUMBERS.__next__)
    """Later ones have greater numbers."""

    @property
    def running(self) -> bool:
        """Whether it is still being made."""
        return self.task is not None and not self.task.done()

    @property
    def conversation(self) -> list[Json]:
        """What a next turn begins with."""
        return [*self.items, *self.response["output"]]

    def wake(self) -> None:
        """Tell all who wait that something is new."""
        self.changed.set()
        self.changed = asyncio.Event()


class ResponseStore:
    """The responses by id. The least recently used ones go when there are too many; those that run stay."""

    def __init__(self, most_bytes: int = MOST_BYTES, most_running: int = MOST_RUNNING, kind: str = "response") -> None:
        """`kind` is what errors call them."""
        self._kind = kind
        self._most_bytes, self._most_running = most_bytes, most_running
        self._kept: dict[str, Kept] = {}
        self.bytes = 0
        """About the memory that they take; what several share counts in each."""

    def __len__(self) -> int:
        return len(self._kept)

    def check_room(self) -> None:
        """Refuse another background response where too many run.

        Raises:
            Overloaded: that is so.
        """
        if sum(kept.running for kept in self._kept.values()) >= self._most_running:
            raise Overloaded(f"{self._most_running} background responses run, which is the limit")

    def keep(self, kept: Kept) -> None:
        """Keep a response, or take note that one has grown."""
        self.forget(kept.response["id"])
        events = sum(map(len, kept.events or ()))
        kept.size = len(encode(kept.response)) + len(encode(kept.items)) + events
        self._kept[kept.response["id"]] = kept
        self.bytes += kept.size
        for id_ in [id_ for id_, one in self._kept.items() if not one.running]:
            if self.bytes <= self._most_bytes:
                break
            self.forget(id_)

    def get(self, id_: str, param: str = "response_id") -> Kept:
        """A response.

        Raises:
            ResponseNotFound: it is not here.
        """
        kept = self._kept.pop(id_, None)
        if kept is None:
            raise ResponseNotFound(
                f"there is no {self._kind} {id_[:80]!r} here: it was never stored, it was dropped to make room for "
                "others, or another API server of this service has it (each keeps its own; see --api-server-count)",
                param,
            )
        self._kept[id_] = kept
        return kept

    def all(self) -> list[Kept]:
        """All of them, the oldest first."""
        return sorted(self._kept.values(), key=lambda kept: kept.number)

    def forget(self, id_: str) -> None:
        """Drop a response; what runs is the caller's to stop. Unknown ids are passed over."""
        if kept := self._kept.pop(id_, None):
            self.bytes -= kept.size
