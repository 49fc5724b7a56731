"""The engine deployment's class, without Ray."""

from types import SimpleNamespace

import pytest

from rayllm.serving.engine_server import EngineServer


@pytest.mark.option("worker-extension-cls")
async def test_methods_of_workers_can_be_called_through_a_handle():
    engine = SimpleNamespace(collective_rpc=lambda method, *args, **kwargs: [(method, args, kwargs)])
    called = await EngineServer.collective_rpc(SimpleNamespace(_engine=engine), "steps", 1, more=2)
    assert called == [("steps", (1,), {"more": 2})]
