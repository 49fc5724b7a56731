"""Lives of KV blocks are measured from take to end, by an injected clock, and of the sampled share only."""

import random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayllm.engine.residency import Residency
from rayllm.kv.blocks import BlockPool
from rayllm.serving.metrics import prometheus_text

from .conftest import make_add

NAMES = ("kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def watched(blocks, share=1.0, **kwargs):
    pool, residency = BlockPool(blocks), Residency(share, **kwargs)
    pool.watch(residency)
    return pool, residency


def sums(residency):
    return {name.split("_")[2]: (sum(d.counts), d.sum) for name, d in residency.histograms.items()}


def test_a_life_runs_from_take_to_eviction(clock):
    pool, residency = watched(1, clock=clock)
    blocks = pool.take(1)
    pool.publish(blocks[0], b"a")
    clock.now += 2
    pool.share(blocks)  # used again 2 s later
    pool.give_back(blocks)
    clock.now += 3
    pool.give_back(blocks)  # let go 5 s after it was taken
    clock.now += 4
    pool.share(blocks)  # used again 7 s later
    clock.now += 1
    pool.give_back(blocks)
    clock.now += 6
    assert sums(residency)["lifetime"] == (0, 0)
    pool.take(1)
    assert sums(residency) == {"lifetime": (1, 16), "idle": (1, 6), "reuse": (2, 9)}


def test_a_block_that_nobody_can_find_ends_when_it_is_let_go(clock):
    pool, residency = watched(2, clock=clock)
    blocks = pool.take(2)
    clock.now += 5
    pool.give_back(blocks)
    assert sums(residency) == {"lifetime": (2, 10), "idle": (2, 0), "reuse": (0, 0)}


def test_dropping_the_cache_ends_what_it_holds(clock):
    pool, residency = watched(2, clock=clock)
    held, cached = pool.take(1), pool.take(1)
    pool.publish(held[0], b"h")
    pool.publish(cached[0], b"c")
    pool.give_back(cached)
    pool.drop_cache()
    assert sums(residency)["lifetime"][0] == 1
    pool.give_back(held)
    assert sums(residency)["lifetime"][0] == 2


@pytest.mark.option("kv-cache-metrics-sample")
@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 10_000, 10_000), (0.1, 900, 1100)])
def test_the_share_of_measured_blocks(share, least, most):
    pool, residency = watched(10, share, draw=random.Random(0).random)
    for _ in range(1000):
        pool.give_back(pool.take(10))
    assert least <= sums(residency)["lifetime"][0] <= most


@pytest.mark.option("kv-cache-metrics", "kv-cache-metrics-sample")
def test_repeated_prompts_show_in_the_metrics(bench):
    one = bench(num_blocks=40, kv_metrics_sample=1.0, async_scheduling=False)
    for turn in range(6):
        for start in range(3):
            one.run(make_add(10 * turn + start, list(range(100 * start + 1, 100 * start + 50)), 9))
    found = samples(one.engine.stats())
    counts = [found[f"vllm:{name}_count"] for name in NAMES]
    assert all(counts), counts
    assert counts[0] == counts[1]
    pool = one.engine._pool
    pool.drop_cache()  # the rest of the lives: now each block that was taken has been freed
    assert samples(one.engine.stats())[f"vllm:{NAMES[0]}_count"] > counts[0]


def test_without_the_option_nothing_is_measured(bench):
    one = bench()
    one.run(make_add(1, [1, 2, 3, 4, 5], 3))
    assert not set(NAMES) & set(one.engine.stats().histograms)


def samples(stats):
    families = text_string_to_metric_families(prometheus_text({"e": stats}, "m").decode())
    return {sample.name: sample.value for family in families for sample in family.samples}
