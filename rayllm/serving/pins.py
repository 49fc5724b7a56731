"""What a process's handles and their request routers tell each other; see `rayllm.serving.request_router`.

It has a module of its own: Serve copies the router's module by value into other processes, where a class defined in it
would not be the class that callers use.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass

Changed = Callable[[frozenset[str]], None]


@dataclass(frozen=True, slots=True)
class Pin:
    """Argument of a handle call that must go to this replica and no other."""

    replica_id: str


class Replicas:
    """The running replicas of a deployment, as this process's request routers hear of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: list[Changed] = []
        self._running: frozenset[str] | None = None

    def watch(self, changed: Changed) -> None:
        """Call `changed` with their ids as soon as they are known, and on every change, from any thread."""
        with self._lock:
            self._watches.append(changed)
            if self._running is not None:
                changed(self._running)

    def tell(self, running: frozenset[str]) -> None:
        """Let all know which replicas run now."""
        with self._lock:
            self._running = running
            for changed in self._watches:
                changed(running)


@functools.cache
def replicas_of(app: str, deployment: str) -> Replicas:
    """Those of one deployment, the same object for all in this process."""
    return Replicas()
