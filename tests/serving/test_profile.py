"""Profiles reach every engine over its session."""

import pytest

from rayllm.errors import RayLLMError


async def test_every_engine_is_profiled(service):
    fleet = await service.start(engines=2)
    await fleet.profile(True)
    await fleet.profile(False)
    assert [engine.profiles for engine in service.engines.values()] == [[True, False]] * 2


async def test_a_failure_is_told(service):
    fleet = await service.start()

    def fail(begin):
        raise OSError("the disk is full")

    service.engines["e1"].profile = fail
    with pytest.raises(RayLLMError, match="engine e1: OSError: the disk is full"):
        await fleet.profile(False)
