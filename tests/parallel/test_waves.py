"""Ranks take the same steps whatever the order of messages, none when all are idle, and no request is forgotten."""

import random
from collections import deque

import pytest

from rayllm.messages.group import Broken, Run, Want
from rayllm.parallel.waves import Coordinator, Member


class Group:
    """A coordinator and its ranks, with a queue of messages each way for each rank. A step ends when all are in it."""

    def __init__(self, size, ahead, rng):
        self.rng, self.ahead = rng, ahead
        self.coordinator = Coordinator(size, ahead)
        self.members = [Member(ahead) for _ in range(size)]
        self.up = [deque() for _ in range(size)]
        self.down = [deque() for _ in range(size)]
        self.work = [0] * size
        """Steps that each rank's requests still take."""
        self.done = [0] * size
        self.ended = [0] * size
        """Steps that are over at each rank."""
        self.entered = [False] * size

    def moves(self):
        """Everything that may happen next."""
        for rank, member in enumerate(self.members):
            if not self.entered[rank]:
                yield self.enter, rank
                continue
            if self.up[rank]:
                yield self.hear, rank
            if self.down[rank]:
                yield self.told, rank
            has_work, through = self.work[rank] > 0, member._through
            asks = has_work and member._asked != member.steps and through - member.steps <= self.ahead // 2
            if asks or (member.may_step and self.ended[rank] == member.steps):
                yield self.turn, rank
            if self.ended[rank] < member.steps and all(one.steps > self.ended[rank] for one in self.members):
                yield self.end, rank

    def enter(self, rank):
        self.entered[rank] = True
        self.send(self.coordinator.enter(rank))

    def hear(self, rank):
        self.send(self.coordinator.take(rank, self.up[rank].popleft()))

    def told(self, rank):
        self.members[rank].take(self.down[rank].popleft())

    def turn(self, rank):
        """What an engine's loop does."""
        member = self.members[rank]
        if want := member.ask(self.work[rank] > 0):
            self.up[rank].append(want)
        if member.may_step and self.ended[rank] == member.steps:
            member.stepped()

    def end(self, rank):
        self.ended[rank] += 1
        if self.work[rank]:
            self.work[rank] -= 1
            self.done[rank] += 1

    def send(self, outgoing):
        for rank, message in outgoing:
            self.down[rank].append(message)

    def run(self, arrivals=()):
        """Moves in random order, with arrivals (rank, steps) in between, until nothing can happen."""
        arrivals = deque(arrivals)
        while True:
            moves = list(self.moves())
            if arrivals and (not moves or self.rng.random() < 0.05):
                rank, steps = arrivals.popleft()
                self.work[rank] += steps
            elif moves:
                move, rank = self.rng.choice(moves)
                move(rank)
            else:
                return


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_messages(seed):
    rng = random.Random(seed)
    size, ahead = rng.randint(1, 6), rng.randint(2, 5)
    group = Group(size, ahead, rng)
    arrivals = [(rng.randrange(size), rng.randint(1, 9)) for _ in range(rng.randint(0, 20))]
    group.run(arrivals)
    wanted = [sum(steps for rank, steps in arrivals if rank == one) for one in range(size)]
    assert group.done == wanted  # no request was left, ...
    assert group.work == [0] * size
    assert len({member.steps for member in group.members}) == 1  # ... nobody stepped alone, ...
    assert group.ended == [member.steps for member in group.members]
    # ... and few steps were empty at all ranks: those that were allowed when work was done.
    assert group.members[0].steps <= sum(wanted) + ahead * len(arrivals)
    assert bool(arrivals) <= group.coordinator.wave <= len(arrivals)


def test_a_wave_ends_and_the_next_begins():
    group = Group(3, 2, random.Random(0))
    group.run([(1, 5)])
    first = group.members[0].steps
    assert 5 <= first <= 7
    assert not any(member.may_step for member in group.members)
    assert group.coordinator.wave == 1
    group.run([(2, 1)])
    assert group.coordinator.wave == 2
    assert first + 1 <= group.members[0].steps <= first + 3


def test_nobody_steps_until_the_group_is_complete():
    coordinator = Coordinator(2)
    assert coordinator.enter(0) == []
    assert coordinator.take(0, Want(0)) == []
    assert coordinator.missing == [1]
    assert coordinator.enter(1) == [(0, Run(2, 1)), (1, Run(2, 1))]


def test_the_loss_of_a_rank_ends_the_group():
    coordinator = Coordinator(3)
    for rank in range(3):
        coordinator.enter(rank)
    coordinator.take(0, Want(0))
    broken = Broken("rank 1 is gone: killed")
    assert coordinator.leave(1, "killed") == [(0, broken), (2, broken)]
    assert coordinator.leave(0, "closed") == []  # the others follow
    member = Member()
    member.take(Run(2, 1))
    member.take(broken)
    assert not member.may_step
    # A new group counts from the start.
    for rank in range(3):
        assert coordinator.enter(rank) == []
    assert [message for _, message in coordinator.take(2, Want(0))] == [Run(2, 2)] * 3


def test_ranks_are_checked():
    coordinator = Coordinator(2)
    coordinator.enter(0)
    for rank in (0, 2, -1):
        with pytest.raises(ValueError, match=f"rank {rank} is"):
            coordinator.enter(rank)


def test_only_ranks_with_work_ask_and_only_once():
    member = Member()
    assert member.ask(False) is None
    assert member.ask(True) == Want(0)
    assert member.ask(True) is None
    member.take(Run(2, 1))
    member.stepped()
    assert member.ask(True) == Want(1)
    member.take(Run(1, 1))  # late
    assert member.may_step
