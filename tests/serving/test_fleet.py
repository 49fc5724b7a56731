"""Requests keep going when engines come and go: no token lost, repeated or changed."""

import asyncio

import pytest

from rayllm.errors import Overloaded, ReplicaLost
from rayllm.messages.ingress import RequestOutput, TokenLogprobs
from rayllm.serving.fake import expected_output
from rayllm.serving.streams import merge


async def test_requests_spread_over_engines(service, helpers):
    fleet = await service.start(engines=3)
    await asyncio.gather(*(fleet.submit([helpers.add([i])]) for i in range(30)))
    assert [e.load().running for e in service.engines.values()] == [10, 10, 10]


async def test_choices_of_one_prompt_stay_together(service, helpers):
    fleet = await service.start(engines=3)
    await fleet.submit([helpers.add([1, 2], choice_index=i) for i in range(6)])
    assert sorted(e.load().running for e in service.engines.values()) == [0, 0, 6]


async def test_prompts_of_one_request_spread(service, helpers):
    fleet = await service.start(engines=3)
    await fleet.submit([helpers.add([i]) for i in range(6)])
    assert [e.load().running for e in service.engines.values()] == [2, 2, 2]


async def test_a_full_engine_is_passed_over(service, helpers):
    fleet = await service.start(engines=1, max_requests=2)
    await fleet.submit([helpers.add([1], choice_index=i) for i in range(2)])
    service.add_engine(max_requests=2)
    await helpers.until(lambda: len(fleet.sessions()) == 2)
    await fleet.submit([helpers.add([2], choice_index=i) for i in range(2)])
    with pytest.raises(Overloaded):
        await fleet.submit([helpers.add([3])])


@pytest.mark.parametrize("seen", [0, 1, 7])
async def test_a_stream_goes_on_elsewhere(service, helpers, seen):
    fleet = await service.start(engines=2)
    [stream] = await fleet.submit([helpers.add([4, 5], max_tokens=20)])
    [first] = [name for name, e in service.engines.items() if e.load().running]
    for _ in range(seen):
        service.engines[first].step()
    reader = asyncio.ensure_future(helpers.tokens_of(stream))
    await helpers.until(lambda: len(stream._tokens) == seen)
    service.kill_engine(first)
    [second] = set(service.engines) - {first}
    await helpers.until(lambda: service.engines[second].load().running == 1)
    resumed = service.engines[second].adds[-1]
    assert resumed.prompt_token_ids == [4, 5]
    assert resumed.output_token_ids == expected_output([4, 5], seen)
    for _ in range(20 - seen):
        service.engines[second].step()
    assert await reader == expected_output([4, 5], 20)


async def test_a_lost_engine_is_replaced_and_its_requests_wait_for_it(service, helpers):
    fleet = await service.start(interval_s=0.002)
    [stream] = await fleet.submit([helpers.add([9], max_tokens=100)])
    await anext(stream)
    service.kill_engine("e1")
    await helpers.until(lambda: not fleet.sessions())
    assert "e1" in fleet.healthy()
    new = asyncio.ensure_future(fleet.submit([helpers.add([8], max_tokens=3)]))
    service.unlist("e1")
    service.add_engine(interval_s=0.002)
    await helpers.tokens_of(stream)
    assert stream._tokens == expected_output([9], 100)
    assert await helpers.tokens_of((await new)[0]) == expected_output([8], 3)
    assert fleet.healthy() is None


async def test_a_request_gives_up_when_no_engine_comes(service, helpers):
    fleet = await service.start(limits=helpers.replace(helpers.limits, admit_wait_s=0.1, replica_wait_s=0.1))
    [stream] = await fleet.submit([helpers.add([9], max_tokens=100)])
    service.engines["e1"].step()
    await helpers.until(lambda: len(stream._tokens) == 1)
    service.kill_engine("e1")
    output = await anext(stream)
    assert output.token_ids == expected_output([9], 1)
    with pytest.raises(ReplicaLost):
        await anext(stream)
    with pytest.raises(Overloaded):
        await fleet.submit([helpers.add([1])])


async def test_a_failed_engine_says_so_and_its_requests_move(service, helpers):
    fleet = await service.start(engines=2)
    [stream] = await fleet.submit([helpers.add([4], max_tokens=5)])
    [first] = [name for name, e in service.engines.items() if e.load().running]
    [second] = set(service.engines) - {first}
    service.engines[first].die("a bug")
    await helpers.until(lambda: service.engines[second].load().running == 1)
    for _ in range(5):
        service.engines[second].step()
    assert await helpers.tokens_of(stream) == expected_output([4], 5)
    assert [s.engine_id for s in fleet.sessions()] == [second]


async def test_a_hung_engine_is_given_up(service, helpers):
    fleet = await service.start(engines=2)
    [stream] = await fleet.submit([helpers.add([4], max_tokens=5)])
    [first] = [name for name, e in service.engines.items() if e.load().running]
    service.engines[first].stalled = 1000.0
    await helpers.until(lambda: service.directory.servers[first].dead is not None)
    [second] = set(service.engines) - {first}
    await helpers.until(lambda: service.engines[second].load().running == 1)
    stream.abort()


async def test_the_first_outputs_of_a_resumed_request_repeat_nothing(service, helpers):
    fleet = await service.start(engines=2)
    [stream] = await fleet.submit([helpers.add([4], max_tokens=5)])
    stream.take(RequestOutput(1, [11], cached_tokens=3, prompt_logprobs=[None]))
    stream.take(RequestOutput(1, [12], cached_tokens=4, prompt_logprobs=[None, TokenLogprobs(1, -1.0, 1)]))
    output = await anext(stream)
    assert (output.token_ids, output.cached_tokens, output.prompt_logprobs) == ([11, 12], 3, [None])
    stream.abort()


async def test_an_unlisted_engine_finishes_its_requests_and_gets_no_new_ones(service, helpers):
    fleet = await service.start(engines=2)
    [stream] = await fleet.submit([helpers.add([4], max_tokens=2)])
    [first] = [name for name, e in service.engines.items() if e.load().running]
    server = service.directory.servers[first]
    service.unlist(first)
    await asyncio.sleep(0.01)
    await fleet.submit([helpers.add([i]) for i in range(3)])
    assert service.engines[first].load().running == 1
    service.engines[first].step()
    service.engines[first].step()
    assert await helpers.tokens_of(stream) == expected_output([4], 2)
    server.shutdown()


async def test_the_choice_of_a_router_is_followed(service, helpers):
    asked = []

    async def choose(engine_ids):
        asked.append(sorted(engine_ids))
        return "e2"

    fleet = await service.start(engines=2, choose=choose)
    for i in range(4):
        await fleet.submit([helpers.add([i])])
    assert asked == [["e1", "e2"]] * 4
    assert service.engines["e2"].load().running == 4


async def test_a_request_aborted_between_engines_is_forgotten(service, helpers):
    fleet = await service.start()
    [stream] = await fleet.submit([helpers.add([9], max_tokens=100)])
    service.kill_engine("e1")
    await helpers.until(lambda: not fleet.sessions())
    stream.abort()
    assert await helpers.tokens_of(stream) == []
    service.unlist("e1")
    engine = service.add_engine()
    await helpers.until(lambda: fleet.sessions())
    await asyncio.sleep(0.02)
    assert engine.adds == []


async def test_closing_fails_what_runs(service, helpers):
    fleet = await service.start()
    [stream] = await fleet.submit([helpers.add([9], max_tokens=100)])
    await fleet.close()
    with pytest.raises(ReplicaLost):
        await anext(stream)


async def test_many_streams_survive_many_losses(service, helpers):
    """Engines are killed and replaced all the time; every stream still ends with exactly its own tokens."""
    fleet = await service.start(engines=2, interval_s=0.001)
    streams = [(await fleet.submit([helpers.add([i], max_tokens=300)]))[0] for i in range(20)]
    readers = [asyncio.ensure_future(helpers.tokens_of(stream)) for stream in streams]
    for _ in range(6):
        await asyncio.sleep(0.05)
        name = next(iter(service.directory.servers))
        service.add_engine(interval_s=0.001)
        service.kill_engine(name)
        service.unlist(name)
    for i, reader in enumerate(readers):
        assert await reader == expected_output([i], 300)


def test_merging_keeps_everything():
    a = RequestOutput(1, [1], logprobs=[TokenLogprobs(1, -0.5, 1)], cached_tokens=2)
    b = RequestOutput(1, [2], "stop", 2, logprobs=[TokenLogprobs(2, -0.1, 1)])
    merged = merge(a, b)
    assert merged.token_ids == [1, 2]
    assert [entry.token_id for entry in merged.logprobs] == [1, 2]
    assert (merged.finish_reason, merged.stop_token_id, merged.cached_tokens) == ("stop", 2, 2)


async def test_closing_ends_what_waits_for_an_engine(service, helpers):
    fleet = await service.start(limits=helpers.replace(helpers.limits, admit_wait_s=60))
    service.kill_engine("e1")
    await helpers.until(lambda: not fleet.sessions())
    waits = asyncio.create_task(fleet.submit([helpers.add([9])]))
    await asyncio.sleep(0.02)
    assert not waits.done()
    await fleet.close()
    for late in (waits, fleet.submit([helpers.add([8])])):
        async with asyncio.timeout(1):
            with pytest.raises(Overloaded, match="shutting down"):
                await late


class TestFromZero:
    async def test_a_request_has_an_engine_brought_up(self, service, helpers):
        fleet = await service.start(engines=0, from_zero=True)
        assert fleet.healthy() is None
        assert service.directory.waking == 0
        asked = [asyncio.ensure_future(fleet.submit([helpers.add([i], max_tokens=2)])) for i in range(3)]
        await helpers.until(lambda: service.directory.waking == 1)
        service.add_engine(interval_s=0.002)
        for i, request in enumerate(asked):
            assert await helpers.tokens_of((await request)[0]) == expected_output([i], 2)
        await helpers.until(lambda: service.directory.waking == 0)
        service.kill_engine("e1")
        await helpers.until(lambda: not fleet.sessions())
        assert "e1" in fleet.healthy()  # still listed
        service.unlist("e1")
        await helpers.until(lambda: fleet.healthy() is None)

    async def test_a_cancelled_one_asks_no_longer(self, service, helpers):
        fleet = await service.start(engines=0, from_zero=True)
        asked = [asyncio.ensure_future(fleet.submit([helpers.add([i])])) for i in range(2)]
        await helpers.until(lambda: service.directory.waking == 1)
        asked[0].cancel()
        await asyncio.sleep(0.01)
        assert service.directory.waking == 1
        asked[1].cancel()
        await helpers.until(lambda: service.directory.waking == 0)
        await asyncio.gather(*asked, return_exceptions=True)

    async def test_one_waits_as_long_as_an_engine_may_take(self, service, helpers):
        limits = helpers.replace(helpers.limits, admit_wait_s=0.05, replica_wait_s=0.3)
        fleet = await service.start(engines=0, limits=limits, from_zero=True)
        began = asyncio.get_running_loop().time()
        with pytest.raises(Overloaded, match="no engine serves now"):
            await fleet.submit([helpers.add([1])])
        assert asyncio.get_running_loop().time() - began >= 0.3
        await helpers.until(lambda: service.directory.waking == 0)

    async def test_failures_to_wake_are_tried_again(self, service, helpers):
        fleet = await service.start(engines=0, from_zero=True)
        calls = []

        async def wake():
            calls.append(None)
            raise ConnectionError("lost")

        service.directory.wake = wake
        asked = asyncio.ensure_future(fleet.submit([helpers.add([1])]))
        await helpers.until(lambda: len(calls) > 2)
        with pytest.raises(Overloaded, match="lost"):
            await asked

    async def test_others_bring_none_up(self, service, helpers):
        fleet = await service.start(engines=0, limits=helpers.replace(helpers.limits, admit_wait_s=0.1))
        assert fleet.healthy() is not None
        with pytest.raises(Overloaded):
            await fleet.submit([helpers.add([1])])
        assert service.directory.opened == []


async def test_an_engine_that_is_unlisted_is_called_no_more(service, helpers):
    await service.start(engines=1)
    service.kill_engine("e1")
    await helpers.until(lambda: len(service.directory.opened) > 1)
    service.unlist("e1")
    await asyncio.sleep(0.05)
    before = len(service.directory.opened)
    await asyncio.sleep(0.1)
    assert len(service.directory.opened) == before
