"""The number of engine replicas is changed, and waited for, by what Serve says."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

from rayllm.errors import Overloaded, RayLLMError
from rayllm.serving import elastic
from rayllm.serving.elastic import ServeScaler


class Scaler(ServeScaler):
    """Over a Serve that does as told when the test says so."""

    def __init__(self):
        super().__init__(SimpleNamespace(deployment_id=None))
        self.status, self.states, self.wanted, self.failure = "HEALTHY", {"RUNNING": 2}, [], None

    def _set(self, engines):
        if self.failure:
            raise self.failure
        self.wanted.append(engines)

    def _status(self):
        return SimpleNamespace(status=self.status, replica_states=self.states)


@pytest.fixture
def scaler(monkeypatch):
    monkeypatch.setattr(elastic, "POLL_S", 0.005)
    return Scaler()


@pytest.mark.option("enable-elastic-ep")
async def test_done_when_as_many_run_and_no_other_is_left(scaler, helpers):
    growing = asyncio.create_task(scaler.scale(3, 5.0))
    await helpers.until(lambda: scaler.wanted == [3])
    for scaler.states in ({"RUNNING": 2, "STARTING": 1}, {"RUNNING": 3, "STOPPING": 1}):
        await asyncio.sleep(0.03)
        assert not growing.done()
    scaler.states = {"RUNNING": 3, "STOPPING": 0}
    await growing
    await scaler.scale(3, 5.0)  # nothing to do


async def test_one_change_at_a_time(scaler):
    scaler.status = "UPSCALING"
    assert await scaler.scaling()
    with pytest.raises(Overloaded, match="changing already"):
        await scaler.scale(1, 5.0)
    assert scaler.wanted == []


async def test_what_takes_too_long_or_cannot_be(scaler):
    with pytest.raises(TimeoutError):
        await scaler.scale(1, 0.03)
    scaler.failure = RayError("no controller")
    with pytest.raises(RayLLMError, match="no controller"):
        await scaler.scale(1, 5.0)
