"""Properties of the engine, over a fake model that reads its context back through the blocks."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from rayllm.engine.engine import count_blocks
from rayllm.errors import ConfigError, ContextTooLong, EngineDead, Overloaded, RequestError
from rayllm.executor.fake import FakeExecutor, next_token
from rayllm.messages.sampling import Thinking
from tests.engine.conftest import VOCAB, Bench, make_add, make_config

Make = Callable[..., Bench]


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of which many share beginnings."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1, VOCAB) for _ in range(40)] for _ in range(4)]
    return [
        rng.choice(stems)[: rng.randint(1, 40)] + [rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 20))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_tokens_do_not_depend_on_the_batch(bench: Make, async_scheduling: bool, caching: bool, policy: str) -> None:
    """Chunks, prefix hits, preemption and neighbours change nothing."""
    bench_ = bench(
        num_blocks=33, max_num_batched_tokens=23, max_num_seqs=7, async_scheduling=async_scheduling,
        enable_prefix_caching=caching, scheduling_policy=policy,
    )  # fmt: skip
    prompts = random_prompts(60)
    rng = random.Random(1)
    adds = [make_add(i, p, rng.randint(1, 60), priority=rng.randint(0, 3)) for i, p in enumerate(prompts)]
    got = bench_.run(*adds)
    for add, tokens in zip(adds, got, strict=True):
        assert tokens == expected(add.prompt_token_ids, add.sampling.max_tokens)
    assert bench_.engine.stats().preemptions > 0
    assert bench_.executor.largest_step <= 23
    stats = bench_.engine.stats()
    assert stats.finished == {"stop": 0, "length": 60, "abort": 0, "error": 0}
    assert stats.generation_tokens == sum(len(tokens) for tokens in got)
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert (stats.prefix_hits > 0) == caching


def test_prefix_hits_save_work(bench: Make) -> None:
    bench_ = bench()
    prompt = list(range(1, 42))
    bench_.run(make_add(0, prompt, 1))
    before = bench_.executor.tokens_computed
    bench_.run(make_add(1, prompt, 1))
    assert bench_.executor.tokens_computed - before == 1
    assert bench_.outputs[0, 1][0].cached_tokens == 40
    bench_.run(make_add(2, prompt, 1, cache_salt="other"))
    assert bench_.outputs[0, 2][0].cached_tokens == 0


def test_choices_sent_together_share_their_prompt(bench: Make) -> None:
    bench_ = bench()
    prompt = list(range(1, 42))
    bench_.run(*(make_add(i, prompt, 1, choice_index=i) for i in range(3)))
    assert bench_.executor.tokens_computed <= 41 + 2


def test_end_tokens_stop_tokens_and_limits(bench: Make) -> None:
    bench_ = bench()
    plain = bench_.run(make_add(0, [5, 6], 20))[0]
    stop = plain[4]
    assert bench_.run(make_add(1, [5, 6], 20, stop_token_ids=(stop,)))[0] == plain[: plain.index(stop) + 1]
    assert bench_.outputs[0, 1][-1].finish_reason == "stop"
    assert bench_.outputs[0, 1][-1].stop_token_id == stop
    assert len(bench_.run(make_add(2, [5, 6], None))[0]) == 126
    assert bench_.outputs[0, 2][-1].finish_reason == "length"
    assert bench_.run(make_add(3, [5, 6], 0, prompt_logprobs=0))[0] == []
    assert bench_.outputs[0, 3][-1].finish_reason == "length"
    assert len(bench_.outputs[0, 3][-1].prompt_logprobs) == 2


def test_prompt_logprobs_survive_chunks_and_preemption(bench: Make) -> None:
    bench_ = bench(num_blocks=32, max_num_batched_tokens=9, max_num_seqs=6)
    prompts = random_prompts(20, seed=3)
    bench_.run(*(make_add(i, p, 50, prompt_logprobs=1, logprobs=0) for i, p in enumerate(prompts)))
    assert bench_.engine.stats().preemptions > 0
    for i, prompt in enumerate(prompts):
        outputs = bench_.outputs[0, i]
        entries = outputs[0].prompt_logprobs
        assert [entry and entry.token_id for entry in entries] == [None, *prompt[1:]]
        assert all(output.prompt_logprobs is None for output in outputs[1:])
        assert [e.token_id for o in outputs for e in o.logprobs] == bench_.tokens((0, i))


def test_resumed_request_goes_on(bench: Make) -> None:
    """Prompt and output so far, sent to another engine, continue with the same tokens and the same limits."""
    whole = bench().run(make_add(0, [1, 2, 3], 30))[0]
    assert bench().run(make_add(0, [1, 2, 3], 30, output_token_ids=whole[:11]))[0] == whole[11:]


def test_abort_frees_blocks_at_once(bench: Make) -> None:
    bench_ = bench(num_blocks=32, max_num_seqs=2)
    for i in range(8):
        bench_.engine.add(i % 2, make_add(i, [1, 2, i + 1], None))
    bench_.wait(lambda: len(bench_.outputs) >= 2)
    for i in range(4):
        bench_.engine.abort(i % 2, i)
    bench_.engine.abort_client(0)
    bench_.engine.abort_client(1)
    bench_.engine.abort(0, 99)
    deadline = time.monotonic() + 10
    while bench_.engine.stats().finished["abort"] + bench_.engine.stats().finished["length"] < 8:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert bench_.run(make_add(50, [9, 8, 7], 5))[0] == expected([9, 8, 7], 5)


def test_abort_storm_under_preemption(bench: Make) -> None:
    bench_ = bench(num_blocks=32, max_num_batched_tokens=16, max_num_seqs=6, max_waiting=10_000)
    rng = random.Random(4)
    prompts = random_prompts(150, seed=5)
    for i, prompt in enumerate(prompts):
        bench_.engine.add(0, make_add(i, prompt, rng.randint(1, 60)))
        if rng.random() < 0.5:
            bench_.engine.abort(0, rng.randrange(i + 1))
    deadline = time.monotonic() + 20
    while sum(bench_.engine.stats().finished.values()) < 150:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for key, outputs in bench_.outputs.items():
        tokens = bench_.tokens(key)
        assert tokens == expected(prompts[key[1]], len(tokens))
        assert sum(o.finish_reason is not None for o in outputs) <= 1


def test_stop_counts_as_stop(bench: Make) -> None:
    bench_ = bench()
    bench_.engine.add(0, make_add(0, [1], None))
    bench_.engine.abort(0, 0, "stop")
    bench_.run(make_add(1, [1], 1))
    assert bench_.engine.stats().finished["stop"] == 1


def test_priority_goes_first(bench: Make) -> None:
    bench_ = bench(max_num_seqs=1, scheduling_policy="priority")
    order: list[int] = []
    bench_.engine.add(0, make_add(0, [1], 100))
    for i, priority in ((1, 5), (2, -1), (3, 0)):
        bench_.engine.add(0, make_add(i, [1, i], 1, priority=priority))
    bench_.wait(lambda: bench_.finished((0, 1), (0, 2), (0, 3)))
    order = [key[1] for key in bench_.outputs if key[1] in (1, 2, 3)]
    assert order == [2, 3, 1]


def test_refusals(bench: Make) -> None:
    bench_ = bench(max_num_seqs=1, max_waiting=2)
    engine = bench_.engine
    for add, error in (
        (make_add(0, []), RequestError),
        (make_add(0, [VOCAB]), RequestError),
        (make_add(0, [-1]), RequestError),
        (make_add(0, [1], n=2), RequestError),
        (make_add(0, [1], temperature=1.0, seed=None), RequestError),
        (make_add(0, [1], extra_args={"none": 1}), RequestError),
        (make_add(0, [1], bad_words_ids=((VOCAB,),)), RequestError),
        (make_add(0, [1], logprobs=0, logprob_token_ids=(VOCAB,)), RequestError),
        (make_add(0, [1], thinking=Thinking(budget=1, begin_ids=(), mark_ids=((1,),), end_ids=(VOCAB,))), RequestError),
        (make_add(0, [1], thinking=Thinking(budget=1, begin_ids=(), mark_ids=((1,),), end_ids=())), RequestError),
        (make_add(0, [1] * 128), ContextTooLong),
    ):
        with pytest.raises(error):
            engine.add(0, add)
    assert len(bench_.run(make_add(0, [1] * 127))[0]) == 1
    for i in range(10, 13):
        engine.add(0, make_add(i, [1], None))
    with pytest.raises(RequestError, match="in use"):
        engine.add(0, make_add(12, [1], None))
    with pytest.raises(Overloaded):
        engine.add(0, make_add(13, [1], None))
    assert engine.stats().rejected == 1
    engine.abort_client(0)


def test_failed_worker_ends_every_request(bench: Make) -> None:
    bench_ = bench(max_num_seqs=2)
    bench_.executor.fail_at = 3
    for i in range(5):
        bench_.engine.add(i, make_add(i, [1], None))
    bench_.wait(lambda: bench_.finished(*((i, i) for i in range(5))))
    assert {bench_.outputs[i, i][-1].finish_reason for i in range(5)} == {"error"}
    assert bench_.engine.dead
    with pytest.raises(EngineDead):
        bench_.engine.add(0, make_add(9, [1]))


def test_idle_engine_sleeps(bench: Make) -> None:
    bench_ = bench()
    bench_.run(make_add(0, [1], 3))
    time.sleep(0.05)
    thread = next(t for t in threading.enumerate() if t.name == "rllm-engine" and t is bench_.engine._thread)
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.3)
    assert time.clock_gettime(clock) - before < 0.001
    assert bench_.engine.stalled_s() == 0


def test_kv_that_cannot_hold_one_request_is_refused() -> None:
    executor = FakeExecutor(VOCAB, 4)
    assert count_blocks(make_config(num_blocks=32), executor) == 32
    assert count_blocks(make_config(num_blocks=None), executor) == 256
    with pytest.raises(ConfigError, match="num-gpu-blocks-override"):
        count_blocks(make_config(num_blocks=31), executor)
    with pytest.raises(ConfigError, match="kv-cache-memory-bytes") as caught:
        count_blocks(make_config(num_blocks=None, kv_cache_memory_bytes=1), executor)
    assert "max-model-len to 0" not in str(caught.value)
