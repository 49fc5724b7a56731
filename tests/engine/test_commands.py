"""Commands that engines carry out between steps."""

import contextlib
import threading

import pytest

from rayllm.engine.pause import names_of
from rayllm.errors import EngineDead, RequestError
from rayllm.messages.engine import AbortNamed, CallWorkers, IsPaused, Pause, Profile, ResetPrefixCache, Resume

from .conftest import Bench, make_add, make_config

PROMPT = list(range(1, 14))


@pytest.fixture
def bench():
    bench = Bench(make_config())
    yield bench
    bench.engine.shutdown()


def outputs(bench, request_id):
    return [token for output in bench.outputs.get((1, request_id), ()) for token in output.token_ids]


def run(bench, request_id, prompt=PROMPT, **more):
    bench.engine.add(1, make_add(request_id, prompt, **more))
    bench.wait(lambda: bench.finished((1, request_id)))
    return outputs(bench, request_id)


def reason(bench, request_id):
    return bench.outputs[1, request_id][-1].finish_reason


class TestPause:
    @pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
    def test_new_requests_wait_for_its_end(self, bench, mode):
        expected = run(bench, 0)
        bench.engine.carry_out(Pause(mode))
        assert bench.engine.carry_out(IsPaused())
        for i in range(1, 5):
            bench.engine.add(1, make_add(i, PROMPT))
        bench.engine.abort(1, 2)
        bench.engine.carry_out(AbortNamed([]))  # has the loop turn
        assert not any(outputs(bench, i) for i in range(1, 5))
        assert bench.engine.load().waiting == 3
        bench.engine.carry_out(Resume())
        assert not bench.engine.carry_out(IsPaused())
        for i in (1, 3, 4):
            bench.wait(lambda i=i: bench.finished((1, i)))
            assert outputs(bench, i) == expected
        assert (1, 2) not in bench.outputs
        bench.wait(lambda: bench.engine.load().running == 0)
        bench.engine.carry_out(ResetPrefixCache())
        bench.engine.check()

    def test_abort_leaves_what_there_is(self, bench):
        expected = run(bench, 0, max_tokens=100)
        bench.engine.add(1, make_add(1, PROMPT, max_tokens=100))
        bench.wait(lambda: len(outputs(bench, 1)) > 2)
        bench.engine.carry_out(Pause("abort"))
        assert bench.finished((1, 1))
        if reason(bench, 1) == "abort":
            assert outputs(bench, 1) == expected[: len(outputs(bench, 1))]
        bench.engine.check()

    def test_wait_finishes_what_runs(self, bench):
        for i in range(3):
            bench.engine.add(1, make_add(i, PROMPT, max_tokens=60))
        bench.engine.carry_out(Pause("wait"))
        assert [len(outputs(bench, i)) for i in range(3)] == [60] * 3
        bench.engine.check()

    def test_keep_goes_on_where_it_stood(self, bench):
        expected = run(bench, 0, max_tokens=100)
        bench.engine.add(1, make_add(1, PROMPT, max_tokens=100))
        bench.wait(lambda: len(outputs(bench, 1)) > 2)
        bench.engine.carry_out(Pause("keep"))
        kept = len(outputs(bench, 1))
        bench.engine.carry_out(AbortNamed([]))
        assert len(outputs(bench, 1)) == kept
        bench.engine.carry_out(Resume())
        bench.wait(lambda: bench.finished((1, 1)))
        assert outputs(bench, 1) == expected

    def test_a_client_that_leaves_takes_its_requests(self, bench):
        bench.engine.carry_out(Pause("wait"))
        bench.engine.add(1, make_add(1, PROMPT))
        bench.engine.abort_client(1)
        bench.engine.carry_out(Resume())
        assert run(bench, 2)
        assert (1, 1) not in bench.outputs


class TestCache:
    def cached(self, bench, request_id):
        run(bench, request_id)
        return bench.outputs[1, request_id][0].cached_tokens

    def test_reset(self, bench):
        assert (self.cached(bench, 0), self.cached(bench, 1)) == (0, 12)
        bench.engine.carry_out(ResetPrefixCache())
        assert (self.cached(bench, 2), self.cached(bench, 3)) == (0, 12)

    def test_running_requests_compute_again(self, bench):
        expected = run(bench, 0, max_tokens=100)
        before = bench.engine.stats().preemptions
        bench.engine.add(1, make_add(1, PROMPT, max_tokens=100))
        for _ in range(5):
            bench.engine.carry_out(ResetPrefixCache(preempt=True))
        bench.wait(lambda: bench.finished((1, 1)))
        assert outputs(bench, 1) == expected
        assert bench.engine.stats().preemptions > before


class TestAborts:
    def test_named(self, bench):
        bench.engine.carry_out(Pause("keep"))
        for i, name in enumerate(("chatcmpl-mine-0123456789ab", "cmpl-mine-ba9876543210", "resp_" + "f" * 32)):
            bench.engine.add(1, make_add(i, PROMPT, external_id=name))
        assert bench.engine.carry_out(AbortNamed(["mine"])) == 2
        assert bench.engine.carry_out(AbortNamed(["mine", "other"])) == 0
        assert [reason(bench, i) for i in (0, 1)] == ["abort", "abort"]
        bench.engine.carry_out(Resume())
        bench.wait(lambda: bench.finished((1, 2)))
        assert reason(bench, 2) == "length"

    def test_names(self):
        assert names_of("chatcmpl-my-id-0123456789ab") == {
            "chatcmpl-my-id-0123456789ab",
            "my-id-0123456789ab",
            "my-id",
        }
        assert names_of("resp_" + "f" * 32) == {"resp_" + "f" * 32, "f" * 32}
        assert names_of("") == frozenset()


def test_calls_of_workers(bench):
    bench.executor.collective_rpc = lambda method, *args, **kwargs: [getattr(bench.executor, method)(*args, **kwargs)]
    assert bench.engine.carry_out(CallWorkers("kv_bytes_per_block")) == [4]
    with pytest.raises(RequestError, match="nothing"):
        bench.engine.carry_out(CallWorkers("nothing"))
    with pytest.raises(RequestError, match="profiler"):
        bench.engine.carry_out(Profile(True))


def test_an_engine_that_ends_leaves_nobody_waiting(bench):
    bench.engine.add(1, make_add(1, PROMPT, max_tokens=100))
    bench.engine.carry_out(Pause("keep"))

    def wait():
        with contextlib.suppress(EngineDead):
            bench.engine.carry_out(Pause("wait"))

    thread = threading.Thread(target=wait)
    thread.start()
    bench.engine.shutdown()
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(EngineDead):
        bench.engine.carry_out(Resume())
