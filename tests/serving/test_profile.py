"""Commands reach every engine over its session."""

import pytest

from rayllm.errors import Overloaded, RayLLMError, RequestError
from rayllm.messages.engine import CallWorkers, Profile, Resume


async def test_every_engine_carries_them_out(service):
    fleet = await service.start(engines=2)
    assert await fleet.command(Profile(True)) == [1, 1]
    await fleet.command(Profile(False))
    assert [engine.commands for engine in service.engines.values()] == [[Profile(True), Profile(False)]] * 2


async def test_a_failure_is_told(service):
    fleet = await service.start()

    def fail(command):
        raise failure

    service.engines["e1"].carry_out = fail
    failure = OSError("the disk is full")
    with pytest.raises(RayLLMError, match="engine e1: OSError: the disk is full"):
        await fleet.command(Profile(False))
    failure = RequestError("no such thing")
    with pytest.raises(RequestError, match="no such thing"):
        await fleet.command(Profile(False))


async def test_without_engines(service):
    fleet = await service.start(engines=0)
    with pytest.raises(Overloaded):
        await fleet.command(Resume())


async def test_answers_of_any_kind_come_over(service):
    fleet = await service.start()
    service.engines["e1"].carry_out = lambda command: [{"a": (1, 2.5)}, {3: None}, object]
    [answer] = await fleet.command(CallWorkers("m", [1, "x"], {"k": [None]}))
    assert answer == [{"a": [1, 2.5]}, {3: None}, "<class 'object'>"]
