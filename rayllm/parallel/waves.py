"""Waves: how the ranks of an expert-parallel group step together. Messages in, messages out; neither clock nor socket.

A step of such a group is a collective: a rank that takes one waits inside it for all others. So all ranks must take the
same number of steps, those without work empty ones, and none once no rank has work. They count their steps, and one
coordinator says through which number they go:

    rank with work ──Want(step)──► coordinator ──Run(through)──► every rank

A rank takes a step only if its number is within the last `Run`, and then it always does. `through` only grows and every
rank hears of each growth, so that all take the same steps in the end, whatever the order of the messages. Only ranks
with work ask for more, so that soon after the last one is done the numbers stand still and all sleep: the wave ends.
A request at any rank begins the next one.

A rank that leaves, because its process died, leaves the others in a collective that cannot end: the group is broken,
all its members begin anew, and the coordinator with them.
"""

from rayllm.messages.group import Broken, Run, Want

AHEAD = 2
"""Steps that a rank with work is let run beyond those that it has taken: one under way, one whose leave is on its way.

As many empty ones may end a wave. More of them save messages in large groups.
"""


Outgoing = list[tuple[int, Run | Broken]]
"""Messages, each with the rank that gets it."""


class Coordinator:
    """Says how far the ranks of one group go. Messages of one rank must come in the order they were sent."""

    def __init__(self, size: int, ahead: int = AHEAD) -> None:
        assert size > 0, size
        assert ahead > 1, ahead
        self.size = size
        self._ahead = ahead
        self._members: set[int] = set()
        self._through = 0
        self._wave = 0

    @property
    def missing(self) -> list[int]:
        """Ranks that have not entered."""
        return [rank for rank in range(self.size) if rank not in self._members]

    @property
    def wave(self) -> int:
        """How many waves there have been."""
        return self._wave

    def enter(self, rank: int) -> Outgoing:
        """A fresh member, which has taken no step.

        Raises:
            ValueError: there is no such rank, or it is taken.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not among {self.size}")
        if rank in self._members:
            raise ValueError(f"rank {rank} is there already")
        self._members.add(rank)
        # What was asked for while the group was not complete.
        return [] if self.missing or not self._through else self._to_all(Run(self._through, self._wave))

    def take(self, rank: int, want: Want) -> Outgoing:
        """A rank asks to go on."""
        assert rank in self._members, rank
        if want.step + self._ahead <= self._through:
            return []
        # Within a wave a rank asks before its leave is used up; see `Member.ask`.
        self._wave += want.step == self._through
        self._through = want.step + self._ahead
        return [] if self.missing else self._to_all(Run(self._through, self._wave))

    def leave(self, rank: int, reason: str) -> Outgoing:
        """A member is gone: all others are told, and count as gone too."""
        if rank not in self._members:
            return []
        self._members.discard(rank)
        told = self._to_all(Broken(f"rank {rank} is gone: {reason}"))
        self._members.clear()
        self._through = 0
        return told

    def _to_all(self, message: Run | Broken) -> Outgoing:
        return [(rank, message) for rank in sorted(self._members)]


class Member:
    """One rank's side."""

    def __init__(self, ahead: int = AHEAD) -> None:
        self.steps = 0
        """Taken so far."""
        self.broken: str | None = None
        self._ahead = ahead
        self._through = 0
        self._asked = -1

    @property
    def may_step(self) -> bool:
        """Whether a step is to be taken, with work or without."""
        return self.steps < self._through and self.broken is None

    def take(self, message: Run | Broken) -> None:
        """What the coordinator says."""
        match message:
            case Run():
                self._through = max(self._through, message.through)
            case Broken():
                self.broken = message.reason

    def ask(self, has_work: bool) -> Want | None:
        """What to send before a step, if anything: only a rank with work, whose leave runs out, asks for more."""
        if not has_work or self._asked == self.steps or self._through - self.steps > self._ahead // 2:
            return None
        self._asked = self.steps
        return Want(self.steps)

    def stepped(self) -> None:
        """A step was taken, or begun: all that counts is that it will be."""
        assert self.may_step
        self.steps += 1
