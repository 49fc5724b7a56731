"""Engines whose steps are those of a group: empty ones while others have work, none alone, none when all idle."""

import queue
import threading
import time

import pytest

from rayllm.engine.engine import Engine
from rayllm.errors import EngineDead
from rayllm.executor.fake import FakeExecutor
from rayllm.kv.blocks import BlockPool
from rayllm.parallel.waves import Coordinator, Member

from .conftest import VOCAB, Bench, make_add, make_config

SIZE = 3
PROMPT = list(range(1, 10))


class Collective(FakeExecutor):
    """Whose steps end only when those of all ranks do."""

    def __init__(self, block_size, barrier):
        super().__init__(VOCAB, block_size)
        self._barrier = barrier
        self.empty = 0

    def submit(self, plan):
        self._barrier.wait(10)
        self.empty += not plan.rows
        return super().submit(plan)


class Line:
    """A rank's waves, over queues in place of sockets."""

    alone = False

    def __init__(self, rank, wants):
        self.rank, self.member, self._wants = rank, Member(), wants
        self.wake = lambda: None

    def watch(self, wake):
        self.wake = wake

    def may_step(self, has_work):
        if self.member.broken:
            raise EngineDead(self.member.broken)
        if want := self.member.ask(has_work):
            self._wants.put((self.rank, want))
        return self.member.may_step

    def stepped(self):
        self.member.stepped()


@pytest.fixture
def ranks():
    """Benches of the engines of one group."""
    coordinator, wants, barrier = Coordinator(SIZE), queue.Queue(), threading.Barrier(SIZE)
    lines = [Line(rank, wants) for rank in range(SIZE)]

    def carry():
        while (asked := wants.get()) is not None:
            tell(coordinator.take(*asked))

    def tell(outgoing):
        for rank, message in outgoing:
            lines[rank].member.take(message)
            lines[rank].wake()

    benches = []
    for line in lines:
        coordinator.enter(line.rank)
        bench, config = Bench.__new__(Bench), make_config()
        bench.executor = Collective(config.block_size, barrier)
        bench.engine = Engine(config, bench.executor, BlockPool(64), line)
        bench.outputs, bench.loads, bench._changed = {}, [], threading.Condition()
        bench.engine.start(bench._deliver)
        bench.lose = lambda rank=line.rank: tell(coordinator.leave(rank, "killed"))
        benches.append(bench)
    carrier = threading.Thread(target=carry)
    carrier.start()
    yield benches
    barrier.abort()
    for bench in benches:
        bench.engine.shutdown()
    wants.put(None)
    carrier.join()


def rest(ranks):
    """Wait until nobody steps any more; the steps of each."""
    before = None
    while (now := [bench.executor.steps for bench in ranks]) != before or any(bench.engine._sent for bench in ranks):
        before = now
        time.sleep(0.02)
    return now


def test_idle_engines_step_along_and_then_all_sleep(ranks, bench):
    [expected] = bench().run(make_add(0, PROMPT, max_tokens=12))
    assert rest(ranks) == [0] * SIZE
    assert ranks[1].run(make_add(0, PROMPT, max_tokens=12)) == [expected]
    steps = rest(ranks)
    assert len(set(steps)) == 1
    assert 12 <= steps[0] <= 15
    assert ranks[0].executor.empty == steps[0]
    assert all(one.engine.stalled_s() == 0 for one in ranks)
    # The next wave, begun by another.
    assert ranks[2].run(make_add(5, PROMPT, max_tokens=12)) == [expected]
    assert len(set(rest(ranks))) == 1


def test_all_at_once(ranks, bench):
    adds = [[make_add(i, [*PROMPT, rank, i], max_tokens=3 + 4 * i) for i in range(4)] for rank in range(SIZE)]
    alone = [bench().run(*some) for some in adds]
    for one, some in zip(ranks, adds, strict=True):
        for add in some:
            one.engine.add(0, add)
    for one, expected in zip(ranks, alone, strict=True):
        one.wait(lambda one=one: one.finished(*((0, i) for i in range(4))))
        assert [one.tokens((0, i)) for i in range(4)] == expected
    assert len(set(rest(ranks))) == 1
    for one in ranks:
        one.engine.check()


def test_an_abort_ends_the_wave(ranks):
    ranks[0].engine.add(0, make_add(0, PROMPT, max_tokens=100))
    ranks[0].wait(lambda: len(ranks[0].tokens((0, 0))) > 3 if (0, 0) in ranks[0].outputs else False)
    ranks[0].engine.abort(0, 0)
    assert len(set(rest(ranks))) == 1
    assert ranks[0].executor.steps < 110


def test_the_loss_of_a_rank_ends_the_engines_of_the_others(ranks):
    ranks[1].lose()
    end = time.monotonic() + 10
    while not (ranks[0].engine.dead and ranks[2].engine.dead):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "rank 1 is gone: killed" in ranks[0].engine.dead
