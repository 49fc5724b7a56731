"""When the loop may take a step: at once where the engine is by itself, with the others where it is one of a group."""

from collections.abc import Callable
from typing import Protocol


class Waves(Protocol):
    """Decides for one engine. `may_step` and `stepped` are called by its loop."""

    alone: bool
    """Whether the engine's steps concern no other, so that empty ones are of no use."""

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread but that of a caller of these methods, when the answer may have changed."""
        ...

    def may_step(self, has_work: bool) -> bool:
        """Whether a step is to be taken. One that is allowed must be taken, an empty one if there is no work.

        Raises:
            EngineDead: the group has lost a member.
        """
        ...

    def stepped(self) -> None:
        """A step was sent."""
        ...


class Alone:
    """Of an engine whose steps concern no other."""

    alone = True

    def watch(self, wake: Callable[[], None]) -> None:
        """The answer changes with the work alone."""

    def may_step(self, has_work: bool) -> bool:
        """Whenever there is work."""
        return has_work

    def stepped(self) -> None:
        """Nobody else counts."""
