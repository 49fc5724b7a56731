"""The wire between an executor and its ranks: both ways, in shared memory and not, and when an end goes."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rayllm.executor import link as link_module
from rayllm.executor.link import Hub, Link, LinkAddress, LinkError
from rayllm.messages.rank import Answered, Ask, CallMethod, End, Hello

SIZE = 3


def wait_for(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


class Both:
    """A hub with its ranks, all in this process."""

    def __init__(self, bind: tuple[str, int] | None = None, by_network: bool = False) -> None:
        self.got: list[tuple[int, object]] = []
        self.lost: list[int] = []
        self.hub = Hub(SIZE, lambda rank, m: self.got.append((rank, m)), lambda rank, _: self.lost.append(rank), bind)
        address = self.hub.address
        if by_network:
            address = LinkAddress(secret=address.secret, host=address.host, port=address.port)
        self.links = [Link(address, rank, SIZE, aside=False) for rank in range(SIZE)]
        self.asides = [Link(address, rank, SIZE, aside=True) for rank in range(SIZE)]
        assert self.hub.wait_complete(10, lambda: None)

    def close(self) -> None:
        self.hub.close()
        for link in (*self.links, *self.asides):
            link.close()


@pytest.fixture(params=["local", "network"])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    network = request.param == "network"
    made = Both(("127.0.0.1", 0) if network else None, network)
    yield made
    made.close()


def test_messages_reach_all_ranks_or_some_in_order(both: Both) -> None:
    ranks = list(range(SIZE))
    sent = [Ask(i, CallMethod("m", ["x" * (i * 1000)])) for i in range(200)]
    taken: list[list[object]] = [[] for _ in ranks]

    def read(rank: int) -> None:
        while not isinstance(message := both.links[rank].receive(), End):
            taken[rank].append(message)

    readers = [threading.Thread(target=read, args=(rank,)) for rank in ranks]
    for reader in readers:
        reader.start()
    for message in sent:
        both.hub.send(message, ranks if message.number % 3 else [1])
    both.hub.send(End(), ranks)
    for reader in readers:
        reader.join(10)
    assert taken[1] == sent
    assert taken[0] == taken[2] == [m for m in sent if m.number % 3]
    both.hub.send(End(), [2], aside=True)
    assert both.asides[2].receive() == End()


def test_what_finds_no_room_in_the_shared_memory_goes_by_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "RING_BYTES", 4096)
    both = Both()
    messages = [Ask(i, CallMethod("m", ["y" * size])) for i, size in enumerate((3000, 3000, 100, 8000, 100, 3000))]
    for message in messages:  # nobody reads yet
        both.hub.send(message, list(range(SIZE)))
    for _ in range(20):  # and now everybody does, round and round the memory
        for link in both.links:
            assert [link.receive() for _ in messages] == messages
        for message in messages:
            both.hub.send(message, list(range(SIZE)))
    both.close()


def test_answers_come_back_from_any_thread(both: Both) -> None:
    threads = [threading.Thread(target=link.send, args=(Answered(i, i),)) for i, link in enumerate(both.links)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(both.got) == SIZE)
    assert sorted(both.got) == [(i, Answered(i, i)) for i in range(SIZE)]


def test_the_end_of_a_rank_is_noticed_once_and_the_end_of_the_hub_by_all(both: Both) -> None:
    both.links[1].close()
    wait_for(lambda: both.lost == [1])
    both.asides[1].close()
    both.hub.send(End(), [1])  # passed over
    both.hub.close()
    for link in (both.links[0], both.links[2], both.asides[0]):
        with pytest.raises(LinkError):
            link.receive()
    assert both.lost == [1]


def test_nothing_has_a_name_once_all_have_come(both: Both) -> None:
    wait_for(lambda: not Path(both.hub.address.path or "").exists())
    assert not Path(both.hub.address.ring or "/none").exists()
    with pytest.raises(LinkError):
        Link(both.hub.address, 0, SIZE, aside=False)


def test_strangers_are_turned_away() -> None:
    hub = Hub(1, lambda rank, m: pytest.fail("heard"), lambda rank, why: pytest.fail("lost"), ("127.0.0.1", 0))
    place = (hub.address.host, hub.address.port)
    for data in (b"\xff" * 64, b"\x04\x00\x00\x00abcd", (10**6).to_bytes(4, "little")):
        with socket.create_connection(place) as stranger:
            stranger.sendall(data)
            stranger.settimeout(10)
            assert stranger.recv(1) == b""
    wrong = Link(LinkAddress(secret="no", host=place[0], port=place[1]), 0, 1, aside=False)
    with pytest.raises(LinkError):
        wrong.receive()
    beyond = Link(hub.address, 5, 1, aside=False)
    with pytest.raises(LinkError):
        beyond.receive()
    assert not hub.wait_complete(0.05, lambda: None)
    hub.close()


def test_an_executor_that_comes_late_is_waited_for_and_one_that_never_comes_is_named() -> None:
    hub = Hub(1, lambda rank, m: None, lambda rank, why: None, ("127.0.0.1", 0), secret="known")
    place = hub.address
    hub.close()
    far = LinkAddress(secret="known", host=place.host, port=place.port)
    with pytest.raises(LinkError, match=f"{place.host}:{place.port}"):
        Link(far, 0, 1, aside=False, patience_s=0.2)
    made: list[Link] = []
    waiting = threading.Thread(target=lambda: made.append(Link(far, 0, 1, aside=False, patience_s=10)))
    waiting.start()
    time.sleep(0.3)
    late = Hub(1, lambda rank, m: None, lambda rank, why: None, (place.host, place.port), secret="known")
    waiting.join(10)
    assert made
    late.close()


def test_a_hello_says_whether_memory_is_shared() -> None:
    heard: list[Hello] = []
    hub = Hub(1, lambda rank, m: None, lambda rank, why: None, ("127.0.0.1", 0))
    greet = hub._greet
    hub._greet = lambda peer, hello: (heard.append(hello), greet(peer, hello))  # type: ignore[assignment]
    near = Link(hub.address, 0, 1, aside=False)
    wait_for(lambda: len(heard) == 1)
    assert heard[0].shares_memory
    near.close()
    hub.close()
