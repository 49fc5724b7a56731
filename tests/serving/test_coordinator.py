"""Servers of a group meet over real sockets, and engines of a group step together through them."""

import asyncio
import contextlib
import threading

import pytest

from rayllm.errors import ConfigError, EngineDead
from rayllm.messages.group import Join, Want
from rayllm.serving import coordinator as module
from rayllm.serving.coordinator import GroupMember, GroupServer
from rayllm.serving.wave_client import WaveClient
from rayllm.serving.wire import encode_frame
from tests.launch import free_port

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    monkeypatch.setattr(module, "SAY_S", 0.05)


@pytest.fixture
async def serve():
    """Starts servers of rank 0, by size; gives each with its port."""
    started = []

    async def start(size, own=(0,), port=0, model="m"):
        server = GroupServer(size, model, own)
        started.append(server)
        return server, await server.start(HOST, port)

    yield start
    for server in started:
        await server.close()


@pytest.fixture
async def member():
    """Makes other servers of a group."""
    made = []

    def make(port, *ranks, size=3, model="m", answer_s=1.0):
        made.append(GroupMember(HOST, port, Join(size=size, ranks=list(ranks), model=model), answer_s))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def test_servers_wait_for_the_last_one(serve, member, helpers, caplog):
    caplog.set_level("INFO", "rayllm.serving.coordinator")
    server, port = await serve(4)
    joining = asyncio.create_task(member(port, 2, 3, size=4).join())
    waiting = asyncio.create_task(server.wait_complete())
    await helpers.until(lambda: server.missing == [1])
    await helpers.until(lambda: "waiting for ranks 1 of 4 to join" in caplog.messages)
    assert not joining.done()
    await member(port, 1, size=4).join()
    await asyncio.gather(joining, waiting)
    assert server.missing == []


async def test_a_server_may_start_before_that_of_rank_0(serve, member):
    port = free_port()
    joining = asyncio.create_task(member(port, 1, size=2).join())
    await asyncio.sleep(0.1)
    await serve(2, port=port)
    await joining


@pytest.mark.option("data-parallel-address")
async def test_an_address_where_nobody_answers(member):
    with pytest.raises(ConfigError, match=r"--data-parallel-address: no server of rank 0 answers at 127.0.0.1:\d+"):
        await member(free_port(), 1, answer_s=0.1).join()
    unknown = GroupMember("no-such-host.invalid", 1, Join(size=2, ranks=[1], model="m"), 0.1)
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        await unknown.join()


@pytest.mark.option("data-parallel-rpc-port")
async def test_a_port_that_is_taken(serve):
    _, port = await serve(2)
    with pytest.raises(ConfigError, match=f"--data-parallel-rpc-port: .*{port}"):
        await serve(2, port=port)


@pytest.mark.parametrize(
    ("ranks", "others", "message"),
    [
        ([0], {}, "--data-parallel-rank: rank 0 joined already"),
        ([2], {}, "--data-parallel-rank: rank 2 of 2 do not exist"),
        ([1], {"size": 3}, "--data-parallel-size: is 3, but 2"),
        ([1], {"model": "n"}, "--served-model-name: is 'n', but 'm'"),
    ],
)
async def test_a_server_that_does_not_fit(serve, member, ranks, others, message):
    _, port = await serve(2)
    with pytest.raises(ConfigError, match=message):
        await member(port, *ranks, **{"size": 2, **others}).join()
    await member(port, 1, size=2).join()  # the one that does is let in


async def test_servers_come_back(serve, member, helpers):
    server, port = await serve(2)
    first = member(port, 1, size=2)
    await first.join()
    await first.close()
    await helpers.until(lambda: server.missing == [1])
    await member(port, 1, size=2).join()
    await server.close()
    anew, _ = await serve(2, port=port)
    await anew.wait_complete()


@pytest.mark.parametrize(
    "bad", [b"\xff\xff\xff\xff", encode_frame([Want(0)]), encode_frame([5]), b"GET / HTTP/1.1\r\n"]
)
async def test_strangers_are_turned_away(serve, member, bad):
    _, port = await serve(2)
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(bad)
    async with asyncio.timeout(3):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    await member(port, 1, size=2).join()


class Steps:
    """An engine's loop: counts its steps, each of which ends when all of the group are in it."""

    def __init__(self, client, barrier):
        self.client, self.barrier = client, barrier
        self.work, self.steps, self.error = 0, 0, None
        self._changed = threading.Condition()
        client.watch(self._look)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _look(self):
        with self._changed:
            self._changed.notify()

    def add(self, work):
        with self._changed:
            self.work += work
            self._changed.notify()

    def _run(self):
        try:
            while True:
                with self._changed:
                    while not self.client.may_step(self.work > 0):
                        self._changed.wait()
                self.client.stepped()
                self.barrier.wait(5)
                self.steps += 1
                self.work = max(0, self.work - 1)
        except (EngineDead, threading.BrokenBarrierError) as error:
            self.error = error


@pytest.fixture
async def engines(serve):
    """Three engines of one group, and those that run as them."""
    _, port = await serve(3, own=(0, 1, 2))
    clients = [WaveClient(rank) for rank in range(3)]
    for client in clients:
        await asyncio.to_thread(client.start, HOST, port)
    barrier = threading.Barrier(3)
    yield [Steps(client, barrier) for client in clients], clients, port
    for client in clients:
        await asyncio.to_thread(client.shutdown)


async def test_engines_step_together(engines, helpers):
    loops, _, _ = engines
    loops[1].add(5)
    await helpers.until(lambda: loops[1].work == 0)
    loops[0].add(3)
    loops[2].add(4)
    await helpers.until(lambda: not any(loop.work for loop in loops))
    await asyncio.sleep(0.05)
    counts = [loop.steps for loop in loops]
    assert len(set(counts)) == 1
    assert 9 <= counts[0] <= 16
    await asyncio.sleep(0.05)
    assert [loop.steps for loop in loops] == counts  # all sleep


async def test_an_engine_that_is_gone_ends_the_group_and_fresh_ones_begin_another(engines, helpers):
    loops, clients, port = engines
    await asyncio.to_thread(clients[1].shutdown)
    await helpers.until(lambda: loops[0].error and loops[2].error)
    assert "rank 1 is gone" in str(loops[0].error)
    fresh = [WaveClient(rank) for rank in range(3)]
    barrier = threading.Barrier(3)
    for client in fresh:
        await asyncio.to_thread(client.start, HOST, port)
    again = [Steps(client, barrier) for client in fresh]
    again[2].add(2)
    await helpers.until(lambda: again[2].work == 0)
    for client in fresh:
        await asyncio.to_thread(client.shutdown)


async def test_an_engine_of_a_wrong_rank(engines, helpers):
    _, _, port = engines
    one = WaveClient(7)
    await asyncio.to_thread(one.start, HOST, port)

    def refused():
        try:
            return one.may_step(True) and False
        except EngineDead as error:
            return "rank 7 is not among 3" in str(error)

    await helpers.until(refused)
    await asyncio.to_thread(one.shutdown)
    with pytest.raises(OSError):
        await asyncio.to_thread(WaveClient(0).start, HOST, free_port())
