"""Questions that wait together go together, and each gets its own answer."""

import asyncio

import pytest

from rayllm.serving.batcher import Batcher


async def test_those_that_wait_share_a_call():
    calls = []

    async def double(numbers):
        calls.append(list(numbers))
        await asyncio.sleep(0.01)
        return [2 * number for number in numbers]

    batcher = Batcher(double, limit=4)
    assert await asyncio.gather(*(batcher.ask(i) for i in range(7))) == [0, 2, 4, 6, 8, 10, 12]
    assert calls == [[0, 1, 2, 3], [4, 5, 6]]
    assert await batcher.ask(9) == 18


async def test_a_failed_call_fails_those_who_shared_it_and_nobody_else():
    async def fussy(numbers):
        await asyncio.sleep(0)
        if 13 in numbers:
            raise ValueError("unlucky")
        return numbers

    batcher = Batcher(fussy, limit=1)
    answers = await asyncio.gather(batcher.ask(1), batcher.ask(13), batcher.ask(2), return_exceptions=True)
    assert answers[0] == 1
    assert isinstance(answers[1], ValueError)
    assert answers[2] == 2


async def test_who_gives_up_does_not_hold_up_the_rest():
    async def slow(numbers):
        await asyncio.sleep(0.02)
        return numbers

    batcher = Batcher(slow, limit=1)
    asks = [asyncio.ensure_future(batcher.ask(i)) for i in range(3)]
    await asyncio.sleep(0)
    asks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asks[1]
    assert [await asks[0], await asks[2]] == [0, 2]
