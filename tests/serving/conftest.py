"""Fake engines behind real sockets, and a directory of them."""

import asyncio
import contextlib
import dataclasses

import pytest

from rayllm.messages.engine import Add
from rayllm.messages.sampling import SamplingParams
from rayllm.serving.fake import FakeEngine
from rayllm.serving.fleet import Fleet
from rayllm.serving.session_server import SessionServer
from rayllm.serving.wire import SessionLimits

FAST = SessionLimits(
    hello_s=0.5,
    ping_s=0.05,
    silence_s=1.0,
    watch_s=0.02,
    retry_s=0.02,
    open_s=1.0,
    admit_wait_s=1.0,
    replica_wait_s=1.0,
    step_s=5.0,
)


class FakeDirectory:
    """Engines that tests add and remove."""

    def __init__(self):
        self.servers = {}
        self.opened = []
        self.waking = 0
        """Calls of `wake` that have not ended."""
        self.woken = asyncio.Event()
        self._changed = lambda replica_ids: None

    def watch(self, changed):
        self._changed = changed
        changed(frozenset(self.servers))

    async def open(self, replica_id):
        self.opened.append(replica_id)
        return await asyncio.to_thread(self.servers[replica_id].address)

    async def wake(self):
        self.waking += 1
        try:
            await self.woken.wait()
        finally:
            self.waking -= 1

    def publish(self):
        self._changed(frozenset(self.servers))


class Service:
    """A fleet over fake engines, all in this process."""

    def __init__(self):
        self.directory = FakeDirectory()
        self.engines = {}
        self.fleet = None
        self._ids = 0

    def add_engine(self, limits=FAST, **kwargs):
        self._ids += 1
        name = f"e{self._ids}"
        self.engines[name] = FakeEngine(**kwargs)
        self.directory.servers[name] = SessionServer(self.engines[name], name, limits)
        self.directory.servers[name].start()
        self.directory.publish()
        return self.engines[name]

    def kill_engine(self, name):
        """End one as a killed process ends: its socket closes, and it is still listed for a while."""
        self.directory.servers[name].shutdown()
        self.engines[name].shutdown()

    def unlist(self, name):
        del self.directory.servers[name]
        self.directory.publish()

    async def start(self, engines=1, limits=FAST, choose=None, from_zero=False, **kwargs):
        for _ in range(engines):
            self.add_engine(**kwargs)
        self.fleet = Fleet(self.directory, "ingress", limits, choose, from_zero)
        self.fleet.start()
        await until(lambda: len(self.fleet.sessions()) == engines)
        return self.fleet

    async def close(self):
        if self.fleet is not None:
            await self.fleet.close()
        for name, server in list(self.directory.servers.items()):
            server.shutdown()
            self.engines[name].shutdown()


async def until(condition, timeout_s=3.0):
    """Wait for a condition that another thread or task makes true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def make_add(prompt, max_tokens=8, **kwargs):
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return Add(request_id=0, prompt_token_ids=list(prompt), sampling=sampling, arrival_time=0.0, **kwargs)


async def tokens_of(stream):
    return [token async for output in stream for token in output.token_ids]


@pytest.fixture
async def service():
    made = Service()
    yield made
    await made.close()


@pytest.fixture
def helpers():
    """The functions and values that tests of this folder share."""

    class Helpers:
        limits = FAST
        add = staticmethod(make_add)
        tokens_of = staticmethod(tokens_of)
        until = staticmethod(until)
        replace = staticmethod(dataclasses.replace)
        suppress = staticmethod(contextlib.suppress)

    return Helpers
