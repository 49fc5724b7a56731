"""`rayllm serve` with an engine of several workers on Ray: one engine's text, and another engine when a worker dies."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from rayllm import LLM, SamplingParams
from tests.launch import Served, served
from tests.models import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.server, pytest.mark.smollm2]

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a little",
    "Water boils at a temperature of",
    "def fibonacci(n):",
]
TOKENS = 24


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    with LLM(str(smollm2_gguf()), dtype="float32", max_model_len=512) as llm:
        results = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
        return [result.outputs[0].text for result in results]


def answer(url: str, prompt: str, tokens: int = TOKENS) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def workers(server: Served) -> list[int]:
    """Process ids of the engine's workers."""
    found = []
    for pid in server.family():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"RankActor" in command:
            found.append(pid)
    return found


@pytest.mark.option("tensor-parallel-size", "distributed-executor-backend")
def test_two_ranks_on_ray_serve_the_text_of_one_and_are_replaced(wanted: list[str], tmp_path: Path) -> None:
    flags = ("--served-model-name", "demo", "--dtype", "float32", "--max-model-len", "512", "-tp", "2")
    with served(smollm2_gguf(), *flags, "--disable-uvicorn-access-log", folder=tmp_path) as server:
        assert len(workers(server)) == 2
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(lambda prompt: answer(server.url, prompt), PROMPTS)) == wanted
            long = pool.submit(answer, server.url, PROMPTS[1], 200)
            time.sleep(1.0)
            victims = workers(server)
            os.kill(victims[1], signal.SIGKILL)
            killed = time.monotonic()
            text = long.result()  # goes on with the engine that comes
            assert text.startswith(wanted[1])
        assert time.monotonic() - killed < 60
        assert not set(workers(server)) & set(victims)
        assert [answer(server.url, prompt) for prompt in PROMPTS] == wanted
        assert answer(server.url, PROMPTS[1], 200) == text


def test_a_group_without_room_says_what_it_needs_and_what_there_is() -> None:
    command = [sys.executable, "-m", "rayllm", "serve", str(smollm2_gguf()), "--host", "127.0.0.1", "--port", "0",
               "-tp", "2", "--distributed-timeout-seconds", "3"]  # fmt: skip
    env = {**os.environ, "RLLM_WORKER_RESOURCES": '{"special": 1}'}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "the cluster has no room for 2 workers" in last
    assert "'special': 1.0" in last
    assert "free are {'CPU': " in last


@pytest.mark.option("nnodes", "node-rank", "master-addr", "master-port")
def test_two_nodes_of_one_engine_join_by_number(wanted: list[str], tmp_path: Path) -> None:
    common = ("--served-model-name", "demo", "--dtype", "float32", "--max-model-len", "512", "-tp", "2",
              "--nnodes", "2", "--master-port", "29541", "--disable-uvicorn-access-log")  # fmt: skip
    second = [sys.executable, "-m", "rayllm", "serve", str(smollm2_gguf()), *common, "--node-rank", "1",
              "--distributed-timeout-seconds", "60"]  # fmt: skip
    log = tmp_path / "second.log"
    with log.open("wb") as out:
        node = subprocess.Popen(second, stdout=out, stderr=subprocess.STDOUT)
    try:
        with served(smollm2_gguf(), *common, folder=tmp_path) as server:
            assert [answer(server.url, prompt) for prompt in PROMPTS[:2]] == wanted[:2]
            assert "joining 127.0.0.1:29541" in log.read_text()
            assert node.poll() is None
    finally:
        node.terminate()
        node.wait(20)
