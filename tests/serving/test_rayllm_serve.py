"""`rayllm serve` as a user meets it: the real server with the demo model, and the official client."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.launch import descendants, free_port, is_zombie, served
from tests.models import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.smollm2]

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time there was a little"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two engines behind two HTTP processes."""
    flags = (
        "--served-model-name", "demo", "--data-parallel-size", "2", "--max-model-len", "1024", "--dtype", "float32",
        "--disable-uvicorn-access-log", "--enable-elastic-ep",
    )  # fmt: skip
    with served(smollm2_gguf(), *flags, folder=tmp_path_factory.mktemp("pair")) as server:
        wait_for(lambda: len(engines(server)) == 2)
        yield server


@pytest.fixture
def client(pair):
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", timeout=120, max_retries=0) as one:
        yield one


def wait_for(condition, timeout_s=90):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def engines(server):
    """Generated tokens by engine."""
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    found = [line for line in lines if line.startswith("vllm:generation_tokens_total{")]
    return {line.split('engine="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in found}


def engine_pids(server):
    family = descendants(server.process.pid)
    return [pid for pid in family if "ServeReplica:rayllm:engine" in command_of(pid)]


def test_chat(client):
    answer = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0, max_tokens=24)
    assert "Paris" in answer.choices[0].message.content
    assert answer.model == "demo"


def test_streamed_chat_is_the_same(client):
    whole = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0, max_tokens=24)
    parts = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0, max_tokens=24, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content


@pytest.mark.option("data-parallel-size")
def test_requests_spread_over_both_engines(pair, client):
    before = engines(pair)
    streams = [
        client.completions.create(model="demo", prompt=f"{STORY} {i}", max_tokens=20, stream=True) for i in range(6)
    ]
    for stream in streams:
        for _ in stream:
            pass
    after = engines(pair)
    assert after.keys() == {"0", "1"}
    assert all(after[name] > before[name] for name in after), (before, after)


def test_every_http_process_answers_for_the_whole_service(pair):
    starts, counts = set(), set()
    wait_for(lambda: _seen(pair, starts, counts))
    assert counts == {2}


def _seen(pair, starts, counts):
    text = httpx.get(f"{pair.url}/metrics", timeout=30).text
    starts.add(next(line for line in text.splitlines() if line.startswith("process_start_time_seconds")))
    counts.add(text.count("vllm:num_requests_running{"))
    return len(starts) == 2


def test_a_stream_survives_the_death_of_its_engine(pair, client):
    ask = {"model": "demo", "prompt": STORY, "max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**ask).choices[0].text
    stream = client.completions.create(**ask, stream=True)
    text = next(stream).choices[0].text
    victim = busy_engine(pair)
    os.kill(victim, 9)
    text += "".join(part.choices[0].text for part in stream)
    assert text == whole
    assert httpx.get(f"{pair.url}/health", timeout=10).status_code == 200
    # Serve puts another replica in the place of the dead one.
    wait_for(lambda: len(engine_pids(pair)) == 2 and victim not in engine_pids(pair))
    wait_for(lambda: len(engines(pair)) == 2)


def test_an_http_process_that_dies_is_replaced(pair):
    def others():
        return [pid for pid in descendants(pair.process.pid) if "spawn_main" in command_of(pid)]

    [victim] = others()
    os.kill(victim, 9)
    wait_for(lambda: others() and victim not in others())
    # The first process never stopped serving.
    assert httpx.get(f"{pair.url}/health", timeout=10).status_code == 200


@pytest.mark.option("enable-elastic-ep")
def test_engines_come_and_go_and_requests_go_on(pair, client):
    def scale(size):
        body = {"new_data_parallel_size": size, "drain_timeout": 90}
        return httpx.post(f"{pair.url}/scale_elastic_ep", json=body, timeout=120)

    ask = {"model": "demo", "prompt": STORY, "max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**ask).choices[0].text
    streams = [client.completions.create(**ask, stream=True) for _ in range(2)]  # one for each engine
    texts = [next(stream).choices[0].text for stream in streams]
    assert scale(1).json() == {"message": "Scaled to 1 data parallel engines"}
    assert len(engine_pids(pair)) == 1
    for i, stream in enumerate(streams):
        texts[i] += "".join(part.choices[0].text for part in stream)
    assert texts == [whole, whole]
    scaling = httpx.post(f"{pair.url}/is_scaling_elastic_ep", timeout=30).json()
    assert scaling == {"is_scaling_elastic_ep": False}
    assert scale(2).status_code == 200
    wait_for(lambda: engines(pair).keys() == {"0", "1"})
    assert client.completions.create(**ask).choices[0].text == whole


def command_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def busy_engine(server):
    """The engine process that used most CPU within a fifth of a second."""

    def ticks(pid):
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))

    before = {pid: ticks(pid) for pid in engine_pids(server)}
    time.sleep(0.2)
    return max(before, key=lambda pid: ticks(pid) - before[pid])


def test_one_cpu_is_enough_and_the_end_is_quick(tmp_path):
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with served(smollm2_gguf(), "--max-model-len", "512", "--api-key", "k", folder=tmp_path) as server:
            reply = httpx.post(
                f"{server.url}/v1/chat/completions",
                json={"messages": FRANCE, "temperature": 0, "max_tokens": 24},
                headers={"authorization": "Bearer k"},
                timeout=120,
            )
            assert "Paris" in reply.json()["choices"][0]["message"]["content"]
            ended = time.monotonic()
        assert time.monotonic() - ended < 10  # 5 s on a machine with nothing else to do
        assert "curl http://127.0.0.1" in server.log.read_text()
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_killed_server_takes_its_parts_along(tmp_path):
    """Nobody is left to clean up; the kernel and the processes themselves do. (Ray's agents take most of a minute.)"""
    with served(smollm2_gguf(), "--max-model-len", "512", folder=tmp_path) as server:
        family = [pid for pid in server.family() if "Agent" not in command_of(pid)]
        assert len(family) > 5
        os.kill(server.process.pid, 9)
        wait_for(lambda: all(is_zombie(pid) for pid in family), 20)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-cache-memory-bytes", "1M"], "--kv-cache-memory-bytes"),
        (["--logits-processors", "no.such:Thing"], "no.such"),
    ],
)
def test_an_engine_that_cannot_start_ends_the_command(flags, message):
    command = [sys.executable, "-m", "rayllm", "serve", str(smollm2_gguf()), "--port", str(free_port()), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
