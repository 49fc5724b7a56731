"""The session protocol over real sockets: what each end does when the other misbehaves."""

import asyncio

import msgspec
import pytest

from rayllm.errors import Overloaded, RequestError
from rayllm.messages.engine import Add, Hello, Ping
from rayllm.messages.ingress import Load, Pong, RequestOutput, TokenLogprobs, Welcome
from rayllm.messages.structured import StructuredOutputs
from rayllm.serving.fake import FakeEngine, expected_output
from rayllm.serving.session_client import Session
from rayllm.serving.session_server import Address, SessionServer
from rayllm.serving.wire import HEADER, encode_frame


@pytest.fixture
def server(helpers):
    engine = FakeEngine()
    made = SessionServer(engine, "e", helpers.limits)
    made.start()
    yield made
    made.shutdown()
    engine.shutdown()


async def connect(server):
    return await asyncio.open_unix_connection(server.address().path)


async def read_messages(reader, kind):
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return msgspec.msgpack.decode(await reader.readexactly(length), type=list[kind])


def hello(server):
    return Hello(server.address().secret, "raw")


async def test_tokens_arrive_as_the_engine_steps(service, helpers):
    fleet = await service.start(interval_s=0.001)
    [stream] = await fleet.submit([helpers.add([1, 2, 3], max_tokens=20)])
    assert await helpers.tokens_of(stream) == expected_output([1, 2, 3], 20)


async def test_tcp_serves_other_machines(server, helpers):
    address = await asyncio.to_thread(server.address, "127.0.0.1")
    assert address.path is None
    session = await Session.open(address, "far", helpers.limits, lambda session, streams: None)
    assert (await session.stats()).generation_tokens == 0
    session.close("done")


async def test_a_whole_frame_of_requests_is_answered_in_order(server):
    reader, writer = await connect(server)
    writer.write(encode_frame([hello(server), Ping(1), Ping(2)]))
    assert await read_messages(reader, Welcome) == [Welcome("e")]
    assert [pong.number for pong in await read_messages(reader, Pong)] == [1, 2]
    writer.close()


@pytest.mark.parametrize(
    "first",
    [
        encode_frame([Hello("wrong", "raw")]),
        encode_frame([Hello("", "raw")]),
        encode_frame([Hello("é", "raw")]),
        encode_frame([Ping(1)]),
        encode_frame([]),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x05hello",
        HEADER.pack(5000) + b"x" * 5000,
        HEADER.pack(2**32 - 1),
    ],
    ids=["secret", "empty secret", "not ascii", "no hello", "no message", "http", "garbage", "too long", "huge"],
)
async def test_who_has_not_shown_the_secret_is_cut_off(server, first):
    reader, writer = await connect(server)
    writer.write(first)
    async with asyncio.timeout(0.4):
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
    writer.close()


async def test_who_says_nothing_is_cut_off(server, helpers):
    reader, writer = await connect(server)
    async with asyncio.timeout(helpers.limits.hello_s + 1):
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
    writer.close()


async def test_garbage_on_an_open_session_ends_it_and_its_requests(server, helpers):
    engine = server._engine
    _, writer = await connect(server)
    writer.write(encode_frame([hello(server), msgspec.structs.replace(helpers.add([1]), request_id=5)]))
    await helpers.until(lambda: engine.load().running == 1)
    writer.write(b"\x00\x00\x00\x01\xff")
    await helpers.until(lambda: engine.load().running == 0)
    assert engine.aborted[-1][1:] == (None, "abort")
    writer.close()


async def test_a_request_longer_than_a_frame_is_refused_and_hurts_nobody(service, helpers):
    fleet = await service.start(limits=helpers.replace(helpers.limits, max_frame=2000))
    session = fleet.sessions()[0]
    with pytest.raises(RequestError, match="too long"):
        await fleet.submit([helpers.add(range(5000))])
    assert fleet.sessions() == [session]
    assert service.engines["e1"].adds == []


async def test_an_output_longer_than_a_frame_ends_its_request_alone(service, helpers):
    small = helpers.replace(helpers.limits, max_frame=2000)
    engine = service.add_engine(limits=small)
    fleet = await service.start(engines=0)
    await helpers.until(fleet.sessions)
    [stream, other] = await fleet.submit([helpers.add([1]), helpers.add([2])])
    logprobs = [TokenLogprobs(1, -1.0, 1, list(range(1000)), [-1.0] * 1000)]
    outputs = [RequestOutput(stream.add.request_id, [1], logprobs=logprobs), RequestOutput(other.add.request_id, [7])]
    engine._deliver({0: outputs}, Load())
    assert (await anext(stream)).finish_reason == "error"
    assert (await anext(other)).token_ids == [7]
    await helpers.until(lambda: engine.load().running == 1)


async def test_many_long_requests_at_once_are_sent_in_several_frames(service, helpers):
    fleet = await service.start(limits=helpers.replace(helpers.limits, max_frame=2 * 2**20), interval_s=0.001)
    streams = await fleet.submit([helpers.add(range(i, 9000), max_tokens=1) for i in range(200)])
    assert [len(await helpers.tokens_of(stream)) for stream in streams] == [1] * 200


async def test_a_vanished_ingress_frees_its_requests(server, helpers):
    _, writer = await connect(server)
    writer.write(encode_frame([hello(server), helpers.add([1])]))
    await helpers.until(lambda: server._engine.load().running == 1)
    writer.transport.abort()
    await helpers.until(lambda: server._engine.load().running == 0)


async def test_a_silent_ingress_frees_its_requests(server, helpers):
    _, writer = await connect(server)
    writer.write(encode_frame([hello(server), helpers.add([1])]))
    await helpers.until(lambda: server._engine.load().running == 1)
    await helpers.until(lambda: server._engine.load().running == 0)
    writer.close()


async def test_the_newer_connection_of_an_ingress_wins(server, helpers):
    _, writer = await connect(server)
    writer.write(encode_frame([hello(server), helpers.add([1])]))
    await helpers.until(lambda: server._engine.load().running == 1)
    reader2, writer2 = await connect(server)
    writer2.write(encode_frame([hello(server)]))
    assert await read_messages(reader2, Welcome) == [Welcome("e")]
    await helpers.until(lambda: server._engine.load().running == 0)
    writer.close()
    writer2.close()


async def test_a_slow_reader_is_dropped(helpers):
    engine = FakeEngine(max_prompt=10**7)
    server = SessionServer(engine, "e", helpers.replace(helpers.limits, write_buffer=20_000, silence_s=60.0))
    server.start()
    _, writer = await asyncio.open_unix_connection(server.address().path, limit=1024)
    adds = [msgspec.structs.replace(helpers.add([i], max_tokens=10_000), request_id=i) for i in range(500)]
    writer.write(encode_frame([hello(server)]) + encode_frame(adds))
    await helpers.until(lambda: engine.load().running == 500)
    # Nobody reads: the socket's own buffers fill first.
    for _ in range(200):
        engine.step()
        if engine.load().running == 0:
            break
        await asyncio.sleep(0.005)
    assert engine.load().running == 0
    writer.close()
    server.shutdown()


async def test_a_session_needs_the_right_secret(server, helpers):
    address = Address(engine_id="e", secret="0" * 64, path=server.address().path)
    with pytest.raises(ConnectionError):
        await Session.open(address, "x", helpers.limits, lambda session, streams: None)


async def test_a_silent_engine_is_given_up(helpers, tmp_path):
    """Something listens, welcomes, and then never answers again."""

    async def mute(reader, writer):
        await read_messages(reader, Hello)
        writer.write(encode_frame([Welcome("e")]))
        await asyncio.sleep(30)

    path = str(tmp_path / "s")
    listener = await asyncio.start_unix_server(mute, path)
    lost = []
    session = await Session.open(
        Address(engine_id="e", secret="", path=path), "x", helpers.limits, lambda s, streams: lost.append(s.lost)
    )
    async with asyncio.timeout(3):
        assert "silent" in await session.wait_lost()
    assert len(lost) == 1
    listener.close()


async def test_refusals_come_back_as_they_were(service, helpers):
    fleet = await service.start(max_requests=1, max_prompt=10)
    with pytest.raises(RequestError) as caught:
        await fleet.submit([helpers.add(range(11))])
    assert caught.value.param == "prompt"
    await fleet.submit([helpers.add([1])])
    with pytest.raises(Overloaded):
        await fleet.submit([helpers.add([2])])


async def test_one_refused_choice_aborts_the_others(service, helpers):
    fleet = await service.start(max_requests=2)
    engine = service.engines["e1"]
    with pytest.raises(Overloaded):
        await fleet.submit([helpers.add([1], choice_index=i) for i in range(3)])
    await helpers.until(lambda: engine.load().running == 0)


async def test_abort_is_passed_on_and_ends_the_stream(service, helpers):
    fleet = await service.start()
    engine = service.engines["e1"]
    [stream] = await fleet.submit([helpers.add([1])])
    stream.abort("stop")
    stream.abort()
    await helpers.until(lambda: engine.load().running == 0)
    assert [reason for _, _, reason in engine.aborted] == ["stop"]
    assert await helpers.tokens_of(stream) == []


async def test_a_cancelled_submit_leaves_nothing_behind(service, helpers):
    fleet = await service.start()
    engine = service.engines["e1"]
    submit = asyncio.ensure_future(fleet.submit([helpers.add([1])]))
    await asyncio.sleep(0)
    submit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submit
    [stream] = await fleet.submit([helpers.add([2])])
    await helpers.until(lambda: engine.load().running == 1)
    stream.abort()


async def test_a_request_with_a_form_is_answered_when_that_is_compiled(service, helpers):
    fleet = await service.start()
    engine = service.engines["e1"]

    async def submit():
        add = helpers.add([1, 2, 3])
        sampling = msgspec.structs.replace(add.sampling, structured_outputs=StructuredOutputs(regex="a"))
        [stream] = await fleet.submit([msgspec.structs.replace(add, sampling=sampling)])
        return stream

    waiting = asyncio.ensure_future(submit())
    await helpers.until(lambda: engine.preparing)
    [plain] = await fleet.submit([helpers.add([1])])
    plain.abort()
    assert not waiting.done()
    engine.end_preparing()
    stream = await waiting
    for _ in range(8):
        engine.step()
    assert await helpers.tokens_of(stream) == expected_output([1, 2, 3], 8)

    waiting = asyncio.ensure_future(submit())
    await helpers.until(lambda: engine.preparing)
    engine.end_preparing(RequestError("wrong", "structured_outputs"))
    with pytest.raises(RequestError, match="wrong") as caught:
        await waiting
    assert caught.value.param == "structured_outputs"

    waiting = asyncio.ensure_future(submit())
    await helpers.until(lambda: engine.preparing)
    waiting.cancel()
    await helpers.until(lambda: not engine.preparing)
    session = fleet.sessions()[0]
    await helpers.until(lambda: not session._offered)
    assert engine.load().running == 0


async def test_outputs_that_wait_are_merged(service, helpers):
    fleet = await service.start()
    engine = service.engines["e1"]
    [stream] = await fleet.submit([helpers.add([1], max_tokens=50)])
    for _ in range(50):
        engine.step()
    await helpers.until(lambda: stream.done)
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    assert outputs[0].token_ids == expected_output([1], 50)
    assert outputs[0].finish_reason == "length"
    assert outputs[0].cached_tokens == 0


async def test_stats_and_load_come_from_every_engine(service, helpers):
    fleet = await service.start(engines=2)
    streams = [(await fleet.submit([helpers.add([i])]))[0] for i in range(4)]
    assert sorted(e.load().running for e in service.engines.values()) == [2, 2]
    assert fleet.load() == 4
    stats = await fleet.stats()
    assert {name: s.load.running for name, s in stats.items()} == {"e1": 2, "e2": 2}
    for stream in streams:
        stream.abort()


async def test_an_idle_session_stays_open_by_heartbeats(service, helpers):
    fleet = await service.start()
    session = fleet.sessions()[0]
    await asyncio.sleep(helpers.limits.silence_s * 1.5)
    assert fleet.sessions() == [session]


async def test_add_survives_the_wire(helpers):
    add = msgspec.structs.replace(helpers.add([1, 2]), output_token_ids=[3], cache_salt="s", priority=-4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(add), type=Add) == add
