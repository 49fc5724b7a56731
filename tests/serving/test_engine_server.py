"""The engine deployment's class, without Ray."""

from types import SimpleNamespace

import pytest

from rayllm.serving.engine_server import EngineServer


@pytest.mark.option("data-parallel-start-rank")
async def test_a_replica_whose_number_changes_has_another_rank(caplog):
    caplog.set_level("INFO", "rayllm.serving.engine_server")
    replica = SimpleNamespace(_engine=SimpleNamespace(rank=5), _first_rank=2)
    await EngineServer.reconfigure(replica, None, SimpleNamespace(rank=3))
    assert caplog.messages == []
    await EngineServer.reconfigure(replica, None, SimpleNamespace(rank=1))
    assert replica._engine.rank == 3
    assert caplog.messages == ["rank 5 is rank 3 from now on"]


@pytest.mark.option("worker-extension-cls")
async def test_methods_of_workers_can_be_called_through_a_handle():
    engine = SimpleNamespace(collective_rpc=lambda method, *args, **kwargs: [(method, args, kwargs)])
    called = await EngineServer.collective_rpc(SimpleNamespace(_engine=engine), "steps", 1, more=2)
    assert called == [("steps", (1,), {"more": 2})]
