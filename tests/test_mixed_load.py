"""Two hundred mixed requests through HTTP on a KV pool that is far too small for them all.

Lengths from 1 to 3,000 tokens, streamed and not, some abandoned, some sent twice, some with several choices: every
one that finishes equals its lone run, and afterwards nothing is held, lost or leaked. Then come mutated requests.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.fuzz import fuzz, make_requests
from tests.launch import Served, served
from tests.models import tiny_chat

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.smollm2]
REQUESTS = 200
VOCAB = range(100, 40000)
LONG = 12
"""Requests that begin together and take 65 blocks each in the end: the pool's 410 cannot hold them all, however quick
the engine and however slow the clients are."""
MODEL = "demo"


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    stream: bool
    leave_after: float | None
    """Seconds after which the client goes away."""


def make_jobs() -> list[Job]:
    rng = random.Random(0)
    stems = [[rng.randrange(100, 40000) for _ in range(3000)] for _ in range(4)]
    jobs = [Job(tuple(rng.choices(VOCAB, k=20)), 500, 1, True, None) for _ in range(LONG)]
    while len(jobs) < REQUESTS:
        length = rng.choice((1, 2, 15, 16, 17, 60, 120, rng.randint(1, 300)))
        if len(jobs) % 25 == 13:
            length = rng.choice((1500, 3000))
        job = Job(
            prompt=tuple(rng.choice(stems)[:length] if rng.random() < 0.6 else rng.choices(VOCAB, k=length)),
            max_tokens=rng.choice((1, 5, 30, 150)), n=3 if rng.random() < 0.1 else 1, stream=rng.random() < 0.5,
            leave_after=rng.uniform(0.05, 3.0) if rng.random() < 0.2 else None,
        )  # fmt: skip
        jobs += [job] * (2 if rng.random() < 0.1 else 1)
    return jobs[:REQUESTS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = (
        "--dtype", "float32", "--max-model-len", "3200", "--num-gpu-blocks-override", "410", "--block-size", "8",
        "--max-num-seqs", "48", "--max-num-batched-tokens", "256", "--served-model-name", MODEL,
        "--disable-uvicorn-access-log",
    )  # fmt: skip
    with served(tiny_chat(tmp_path_factory.mktemp("tiny")), *flags, folder=tmp_path_factory.mktemp("mixed")) as one:
        yield one


def body(job: Job) -> dict[str, object]:
    return {
        "model": MODEL, "prompt": list(job.prompt), "max_tokens": job.max_tokens, "n": job.n, "temperature": 0,
        "ignore_eos": True, "stream": job.stream, "return_token_ids": True,
    }  # fmt: skip


async def run(client: httpx.AsyncClient, job: Job) -> list[list[int]] | None:
    """Token ids of each choice; None where the client left."""
    try:
        async with asyncio.timeout(job.leave_after):
            return await (read_stream if job.stream else read_whole)(client, job)
    except TimeoutError:
        return None


async def read_whole(client: httpx.AsyncClient, job: Job) -> list[list[int]]:
    reply = await client.post("/v1/completions", json=body(job))
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


async def read_stream(client: httpx.AsyncClient, job: Job) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in range(job.n)]
    async with client.stream("POST", "/v1/completions", json=body(job)) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    out[choice["index"]] += choice.get("token_ids") or []
    return out


async def run_all(url: str, jobs: list[Job], at_once: int) -> list[list[list[int]] | None]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        gate = asyncio.Semaphore(at_once)

        async def one(job: Job) -> list[list[int]] | None:
            async with gate:
                return await run(client, job)

        return await asyncio.gather(*(one(job) for job in jobs))


def counts(server: Served) -> dict[str, float]:
    names = ("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total", "prefix_cache_hits_total")
    out = {name: server.metric(f"vllm:{name}") for name in names}
    for reason in ("stop", "length", "abort", "error"):
        out[reason] = server.metric("vllm:request_success_total", finished_reason=reason)
    return out


def wait_idle(server: Served) -> None:
    end = time.monotonic() + 20
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting"):
        assert time.monotonic() < end, "requests are left"
        time.sleep(0.1)


def test_every_answer_is_that_of_a_lone_run(server: Served) -> None:
    jobs = make_jobs()
    stay = [Job(j.prompt, j.max_tokens, 1, False, None) for j in jobs if j.leave_after is None]
    lone = dict.fromkeys(stay)
    for job in lone:
        lone[job] = asyncio.run(run_all(server.url, [job], 1))[0][0]
    wait_idle(server)
    before = counts(server)

    got = asyncio.run(run_all(server.url, jobs, REQUESTS))
    wait_idle(server)
    after = {name: value - before[name] for name, value in counts(server).items()}

    for job, choices in zip(jobs, got, strict=True):
        if job.leave_after is None:
            assert choices == [lone[Job(job.prompt, job.max_tokens, 1, False, None)]] * job.n
    assert after["num_preemptions_total"] > 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert after["error"] == after["stop"] == 0
    # Of the clients that left, some were gone before their request had reached an engine.
    assert sum(job.n for job in jobs if job.leave_after is None) <= after["length"]
    assert after["length"] + after["abort"] <= sum(job.n for job in jobs)
    assert after["abort"] > 0
    stayed = [job for job in jobs if job.leave_after is None]
    assert after["generation_tokens_total"] >= sum(job.n * job.max_tokens for job in stayed)
    assert after["prompt_tokens_total"] >= sum(job.n * len(job.prompt) for job in stayed)


def test_memory_is_flat(server: Served) -> None:
    jobs = [job for job in make_jobs() if len(job.prompt) < 400][:60]
    sizes = []
    for _ in range(4):
        asyncio.run(run_all(server.url, jobs, 60))
        wait_idle(server)
        sizes.append(server.memory())
    assert sizes[-1] - sizes[1] < 30e6, [size >> 20 for size in sizes]


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.long)])
def test_mutated_requests_break_nothing(server: Served, count: int) -> None:
    seed = count
    print(f"python -m tests.fuzz URL --seed {seed} --requests {count}")
    out = asyncio.run(fuzz(server.url, make_requests(seed, count)))
    assert not out.faults, "\n".join(out.faults[:10])
    assert out.left > count / 100
    assert out.statuses[200] > count / 8
    assert out.statuses[400] > count / 5
    wait_idle(server)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    plain = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
    assert plain.json()["usage"]["completion_tokens"] == 2


def test_the_log_shows_no_fault(server: Served) -> None:
    text = Path(server.log).read_text(errors="replace")
    assert "Traceback" not in text
    assert "ERROR" not in text
