"""What callers leave for the engine's loop: requests, once their forms are compiled, ends of requests, and commands."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rayllm.errors import EngineDead, Overloaded, RequestError
from rayllm.messages.engine import Add

Key = tuple[int, int]
"""Number of a client, and its number of a request."""
Task = tuple[Callable[[], Any], "Future[Any]"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request on its way into the loop, the embeddings of its prompt, and the grammar that it holds."""

    client: int
    add: Add
    embeds: bytes | None = None
    grammar: object = None

    @property
    def key(self) -> Key:
        """What the loop knows it by."""
        return (self.client, self.add.request_id)


@dataclass(frozen=True, slots=True)
class Aborted:
    """The end of a request, or, without an id, of all of a client."""

    client: int
    request_id: int | None
    reason: str = "abort"


@dataclass(frozen=True, slots=True)
class Taken:
    """What the loop is to do before its next step."""

    items: list[Admitted | Aborted]
    tasks: list[Task]


class Inbox:
    """Stands between the callers' threads and the loop's. Thread-safe."""

    def __init__(self, most_open: int) -> None:
        """`most_open` requests may run or wait."""
        self._most_open = most_open
        # Changed only under the condition's lock.
        self._wake = threading.Condition()
        self._items: list[Admitted | Aborted] = []
        self._tasks: list[Task] = []
        self._open: set[Key] = set()
        self._preparing: dict[Key, Future[None]] = {}
        """Those of the open requests whose grammar is being compiled."""
        self._stopping = False
        self._dead: str | None = None

    @property
    def dead(self) -> str | None:
        """Why the loop ended by a fault, or None."""
        return self._dead

    @property
    def open(self) -> frozenset[Key]:
        """The requests that run, wait, or are being prepared."""
        with self._wake:
            return frozenset(self._open)

    def put(self, admitted: Admitted, grammar: "Future[Any] | None") -> "Future[None] | None":
        """Leave a request; one with a grammar once that is compiled, which the future tells. See `Engine.add`.

        Raises:
            RequestError: its id is in use.
            Overloaded: too many requests wait.
            EngineDead: the engine serves no more.
        """
        key = admitted.key
        with self._wake:
            self._check_alive()
            if key in self._open:
                raise RequestError(f"request id {admitted.add.request_id} is in use", "request_id")
            if len(self._open) >= self._most_open:
                raise Overloaded(f"{len(self._open)} requests run or wait, which is the limit")
            self._open.add(key)
            if grammar is None:
                self._leave(admitted)
                return None
            answer = self._preparing[key] = Future()
        grammar.add_done_callback(lambda compiled: self._put_prepared(admitted, answer, compiled))
        return answer

    def _put_prepared(self, admitted: Admitted, answer: "Future[None]", compiled: "Future[Any]") -> None:
        """Leave a request whose grammar is compiled, or is not to be had."""
        key = admitted.key
        error = CancelledError() if compiled.cancelled() else compiled.exception()
        with self._wake:
            if self._preparing.get(key) is not answer:
                return  # aborted meanwhile
            del self._preparing[key]
            if error is not None:
                self._open.discard(key)
                answer.set_exception(error)
                return
            answer.set_result(None)
            self._leave(replace(admitted, grammar=compiled.result()))

    def abort(self, client: int, request_id: int, reason: str) -> None:
        """Leave the end of a request. Unknown ids are passed over."""
        key = (client, request_id)
        with self._wake:
            if key in self._preparing:
                self._give_up_preparing(key)
            elif key in self._open:
                self._leave(Aborted(client, request_id, reason))

    def abort_client(self, client: int) -> None:
        """Leave the end of all requests of a client."""
        with self._wake:
            for key in [key for key in self._preparing if key[0] == client]:
                self._give_up_preparing(key)
            self._leave(Aborted(client, None))

    def do(self, work: Callable[[], T]) -> "Future[T]":
        """Leave something to be done between two steps.

        Raises:
            EngineDead: the engine serves no more.
        """
        done: Future[T] = Future()
        with self._wake:
            self._check_alive()
            self._tasks.append((work, done))
            self._wake.notify()
        return done

    def take(self, idle: Callable[[], None] | None) -> Taken | None:
        """All that was left. With `idle` it calls that and waits while nothing is there. None at the end."""
        with self._wake:
            if idle is not None and not self._items and not self._tasks:
                idle()
                while not self._items and not self._tasks and not self._stopping:
                    self._wake.wait()
            if self._stopping:
                return None
            taken = Taken(self._items, self._tasks)
            self._items, self._tasks = [], []
        return taken

    def forget(self, key: Key) -> None:
        """Note that a request has ended."""
        with self._wake:
            self._open.discard(key)

    def stop(self) -> None:
        """Take nothing more, and have `take` return None. Idempotent."""
        with self._wake:
            self._stopping = True
            self._open -= self._preparing.keys()
            preparing = self._empty_preparing()
            self._wake.notify()
        for answer in preparing:
            answer.set_exception(self.closed())

    def die(self, reason: str) -> list[Key]:
        """Take nothing more because of a fault; the requests that the loop did not come to take."""
        with self._wake:
            self._dead = reason
            left = [item.key for item in self._items if isinstance(item, Admitted)]
            self._items = []
            self._open.clear()
            preparing = self._empty_preparing()
        for answer in preparing:
            answer.set_exception(self.closed())
        return left

    def fail_tasks(self) -> None:
        """Tell all who wait for something to be done that the loop has ended."""
        with self._wake:
            tasks, self._tasks = self._tasks, []
        for _, done in tasks:
            done.set_exception(self.closed())

    def closed(self) -> EngineDead:
        """Why nothing more is taken."""
        return EngineDead(self._dead or "the engine is shutting down")

    def _check_alive(self) -> None:
        if self._dead is not None or self._stopping:
            raise self.closed()

    def _leave(self, item: Admitted | Aborted) -> None:
        self._items.append(item)
        self._wake.notify()

    def _give_up_preparing(self, key: Key) -> None:
        self._open.discard(key)
        self._preparing.pop(key).set_exception(RequestError("the request was aborted before it was admitted"))

    def _empty_preparing(self) -> "list[Future[None]]":
        preparing, self._preparing = self._preparing, {}
        return list(preparing.values())
