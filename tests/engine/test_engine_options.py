"""Options of the engine, seen in what it delivers, counts and logs."""

import random
import re
import time
from collections.abc import Callable

import pytest

from rayllm.engine.engine import count_blocks
from rayllm.errors import ConfigError
from rayllm.executor.fake import FakeExecutor
from tests.engine.conftest import VOCAB, Bench, make_add
from tests.engine.options import config_of
from tests.engine.test_engine import expected, random_prompts

Make = Callable[..., Bench]
ITERATION = re.compile(r"iteration (\d+): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
                       r"(\d+) generation tokens, ([\d.]+) ms")  # fmt: skip


@pytest.mark.option("enable-logging-iteration-details")
@pytest.mark.parametrize("flag", ["--async-scheduling", "--no-async-scheduling"])
def test_each_step_is_logged(bench: Make, logged: pytest.LogCaptureFixture, flag: str) -> None:
    bench_ = bench(config_of(flag, "--enable-logging-iteration-details", "--max-num-batched-tokens", "64"))
    bench_.run(make_add(0, list(range(1, 151)), 10))
    lines = [ITERATION.fullmatch(message) for message in logged.messages]
    steps = [tuple(map(int, line.groups()[:5])) for line in lines if line]
    assert [step[2] for step in steps if step[1]] == [64, 64, 22]
    assert [step[3:] for step in steps if not step[1]] == [(1, 1)] * 9
    assert [step[0] for step in steps] == list(range(12))
    logged.clear()
    bench(config_of(flag)).run(make_add(0, [1], 2))
    assert not any(map(ITERATION.fullmatch, logged.messages))


@pytest.mark.option("stream-interval")
@pytest.mark.parametrize(("tokens", "sizes"), [(1, [1] * 20), (10, [1, 10, 9]), (100, [1, 19]), (19, [1, 19])])
def test_tokens_come_in_intervals(bench: Make, tokens: int, sizes: list[int]) -> None:
    bench_ = bench(config_of("--stream-interval", str(tokens)))
    assert bench_.run(make_add(0, [1, 2, 3], 20, logprobs=0))[0] == expected([1, 2, 3], 20)
    outputs = bench_.outputs[0, 0]
    assert [len(output.token_ids) for output in outputs] == sizes
    assert [entry.token_id for output in outputs for entry in output.logprobs] == bench_.tokens((0, 0))
    assert [output.finish_reason for output in outputs] == [None] * (len(sizes) - 1) + ["length"]
    assert bench_.engine.stats().generation_tokens == 20
    assert bench_.run(make_add(1, [1, 2, 3], 1))[0] == expected([1, 2, 3], 1)
    for number, (own, its_sizes) in enumerate(((1, [1] * 20), (7, [1, 7, 7, 5])), 2):
        assert bench_.run(make_add(number, [1, 2, 3], 20, stream_interval=own))[0] == expected([1, 2, 3], 20)
        assert [len(output.token_ids) for output in bench_.outputs[0, number]] == its_sizes


@pytest.mark.option("max-num-seqs")
def test_no_more_requests_run_than_allowed(bench: Make) -> None:
    bench_ = bench(config_of("--max-num-seqs", "2"))
    bench_.run(*(make_add(i, [i + 1], 40) for i in range(5)))
    assert max(load.running for load in bench_.loads) == 2
    assert max(load.waiting for load in bench_.loads) > 0


@pytest.mark.option("num-gpu-blocks-override")
def test_the_number_of_blocks_is_what_was_said(bench: Make) -> None:
    config = config_of("--num-gpu-blocks-override", "9", "--max-model-len", "144")
    assert count_blocks(config, FakeExecutor(VOCAB, 16)) == 9
    few, many = bench(config), bench(config_of("--max-model-len", "144"))
    adds = [make_add(i, [i + 1], 100) for i in range(4)]
    assert few.run(*adds) == many.run(*adds)
    assert few.engine.stats().blocks_total == 9
    assert few.engine.stats().preemptions > 0
    assert many.engine.stats().preemptions == 0


@pytest.mark.option("kv-cache-memory-bytes")
def test_bytes_decide_the_number_of_blocks() -> None:
    executor = FakeExecutor(VOCAB, 16)  # 16 bytes a block
    for share in ("0.92", "0.1"):
        config = config_of("--kv-cache-memory-bytes", "16M", "--gpu-memory-utilization", share)
        assert count_blocks(config, executor) == 1 << 20
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        count_blocks(config_of("--kv-cache-memory-bytes", "511"), executor)


@pytest.mark.option("enable-prefix-caching", "block-size")
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("flag", ["--enable-prefix-caching", "--no-enable-prefix-caching"])
def test_a_known_prefix_is_not_computed_again(bench: Make, flag: str, block: int) -> None:
    bench_ = bench(config_of(flag, "--block-size", str(block)))
    stem = list(range(1, 51))
    bench_.run(make_add(0, stem, 1))
    assert bench_.run(make_add(1, [*stem, 7, 8], 5))[0] == expected([*stem, 7, 8], 5)
    hits = 50 // block * block if flag == "--enable-prefix-caching" else 0
    assert bench_.outputs[0, 1][0].cached_tokens == bench_.engine.stats().prefix_hits == hits
    assert bench_.executor.tokens_computed == 50 + 52 - hits + 4


@pytest.mark.option("prefix-caching-hash-algo")
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_every_hash_finds_prefixes(bench: Make, algorithm: str) -> None:
    bench_ = bench(config_of("--prefix-caching-hash-algo", algorithm))
    prompt = list(range(1, 60))
    assert bench_.run(make_add(0, prompt, 3)) == bench_.run(make_add(1, prompt, 3)) == [expected(prompt, 3)]
    assert bench_.outputs[0, 1][0].cached_tokens == 48
    bench_.run(make_add(2, prompt, 3, cache_salt="other"))
    assert bench_.outputs[0, 2][0].cached_tokens == 0


@pytest.mark.option("performance-mode")
def test_modes_differ_in_what_a_step_holds(bench: Make) -> None:
    limits, tokens = {}, set()
    for mode in ("interactivity", "balanced", "throughput"):
        config = config_of("--performance-mode", mode, "--num-gpu-blocks-override", "64")
        limits[mode] = config.max_num_batched_tokens, config.max_num_seqs
        bench_ = bench(config)
        tokens.add(tuple(map(tuple, bench_.run(*(make_add(i, list(range(i + 1, i + 300)), 5) for i in range(8))))))
        assert bench_.executor.largest_step <= config.max_num_batched_tokens
        given = config_of("--performance-mode", mode, "--max-num-seqs", "3", "--max-num-batched-tokens", "99")
        assert (given.max_num_batched_tokens, given.max_num_seqs) == (99, 3)
    assert limits == {"interactivity": (128, 64), "balanced": (512, 256), "throughput": (2048, 1024)}
    assert len(tokens) == 1
    assert config_of().max_num_seqs == 256


@pytest.mark.option("async-scheduling")
@pytest.mark.parametrize("flag", ["--async-scheduling", "--no-async-scheduling"])
def test_a_step_is_sent_before_the_last_one_was_taken_in(bench: Make, flag: str) -> None:
    config = config_of(flag)
    assert config.async_scheduling == (flag == "--async-scheduling")
    bench_ = bench(config)
    events: list[str] = []
    submit, commit = bench_.executor.submit, bench_.engine._scheduler.commit
    bench_.executor.submit = lambda plan: events.append(f"sent {plan.step}") or submit(plan)
    bench_.engine._scheduler.commit = lambda step, result: (
        events.append(f"back {step.plan.step}") or commit(step, result)
    )
    assert bench_.run(make_add(0, [1, 2], 5))[0] == expected([1, 2], 5)
    early = [events.index(f"sent {i + 1}") < events.index(f"back {i}") for i in range(4)]
    assert early == [config.async_scheduling] * 4


@pytest.mark.parametrize("flag", ["--async-scheduling", "--no-async-scheduling"])
def test_tokens_are_the_same_with_everything_at_once(bench: Make, flag: str) -> None:
    """Pieces of several prompts, little room, intervals, aborts: the loop as it runs."""
    config = config_of(
        flag, "--max-num-partial-prefills", "3", "--long-prefill-token-threshold", "30", "--max-model-len", "104",
        "--no-scheduler-reserve-full-isl", "--max-num-batched-tokens", "23", "--max-num-seqs", "7", "--block-size", "4",
        "--stream-interval", "4", "--num-gpu-blocks-override", "27", "--scheduling-policy", "priority",
    )  # fmt: skip
    bench_ = bench(config)
    rng = random.Random(8)
    prompts = random_prompts(80, seed=9)
    limits = [rng.randint(1, 40) for _ in prompts]
    for i, prompt in enumerate(prompts):
        bench_.engine.add(0, make_add(i, prompt, limits[i], priority=rng.randint(0, 3), prompt_logprobs=0))
        if rng.random() < 0.2:
            bench_.engine.abort(0, rng.randrange(i + 1))
    deadline = time.monotonic() + 30
    while sum(bench_.engine.stats().finished.values()) < 80:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert bench_.engine.stats().preemptions > 0
    for (_, i), outputs in bench_.outputs.items():
        wanted = expected(prompts[i], limits[i])
        tokens = bench_.tokens((0, i))
        assert tokens == (wanted if outputs[-1].finish_reason else wanted[: len(tokens)])
        assert [e and e.token_id for e in outputs[0].prompt_logprobs] == [None, *prompts[i][1:]]
