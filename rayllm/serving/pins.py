"""Arguments of handle calls that are meant for the caller's own request router; see `rayllm.serving.request_router`.

They have a module of their own: Serve copies the router's module by value into other processes, where a class defined
in it would not be the class that callers use.
"""

from collections.abc import Callable
from dataclasses import dataclass

Changed = Callable[[frozenset[str]], None]


@dataclass(frozen=True, slots=True)
class Pin:
    """Argument of a handle call that must go to this replica and no other."""

    replica_id: str


class Watch:
    """Argument of a handle call by which `changed` gets the ids of the running replicas, now and on every change.

    It stays in the process: to the replica that gets the call it is a `Watch` of nothing.
    """

    def __init__(self, changed: Changed | None = None) -> None:
        self.changed = changed

    def __reduce__(self) -> tuple[type["Watch"], tuple[()]]:
        return Watch, ()
