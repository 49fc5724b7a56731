"""Servers of one data-parallel group as users start them: each by itself, on one machine."""

import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.launch import free_port, served
from tests.models import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.smollm2]

ASK = {"prompt": "Once upon a time there was a little", "max_tokens": 20, "temperature": 0}
FLAGS = ("--served-model-name", "demo", "--max-model-len", "512", "--dtype", "float32", "-dp", "2")


@pytest.mark.long
@pytest.mark.option(
    "data-parallel-rank", "data-parallel-external-lb", "data-parallel-address", "data-parallel-rpc-port"
)
def test_two_servers_form_a_group_and_each_serves_its_own_requests(tmp_path):
    port = str(free_port())
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starts = [served(smollm2_gguf(), *FLAGS, "-dpn", str(rank), "-dpp", port, folder=tmp_path) for rank in (0, 1)]
        servers = list(pool.map(stack.enter_context, starts))
        texts = [httpx.post(f"{one.url}/v1/completions", json=ASK, timeout=120).json() for one in servers]
        assert texts[0]["choices"][0]["text"] == texts[1]["choices"][0]["text"]
        httpx.post(f"{servers[1].url}/v1/completions", json=ASK, timeout=120)
        for rank, requests in ((0, 1), (1, 2)):
            assert servers[rank].metric("vllm:request_success_total", engine=str(rank)) == requests
            assert servers[rank].metric("vllm:request_success_total") == requests
            assert f"serves as rank {rank} of 2" in servers[rank].log.read_text()
        third = command("-dpn", "1", "-dpp", port)
        assert third.returncode == 1
        assert "--data-parallel-rank: rank 1 joined already" in third.stderr


def command(*flags):
    """A `rayllm serve` that ends by itself."""
    start = [sys.executable, "-m", "rayllm", "serve", str(smollm2_gguf()), "--port", str(free_port()), *FLAGS, *flags]
    return subprocess.run(start, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.option("data-parallel-address")
def test_an_address_that_is_not_this_machines():
    done = command("-dpn", "0", "-dpa", "192.0.2.1")
    assert done.returncode == 1
    assert "192.0.2.1" in done.stderr.splitlines()[-1]
