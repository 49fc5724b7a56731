"""An engine whose workers are on two Ray nodes, each of a single CPU, on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.launch import descendants, served
from tests.models import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.server, pytest.mark.smollm2]

NODES = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 100_000_000}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
cluster.add_node(**node)
print("ADDRESS", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 24}


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    """Environment variables by which commands reach the cluster."""
    variables = {
        **os.environ,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else nodes take another address than 127.0.0.1
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    nodes = subprocess.Popen(
        [sys.executable, "-c", NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True
    )
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    try:
        lines = (line.split() for line in nodes.stdout)
        address = next(words[1] for words in lines if words[:1] == ["ADDRESS"])
        yield {**variables, "RAY_ADDRESS": address}
    finally:
        family = [nodes.pid, *descendants(nodes.pid)]
        nodes.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            nodes.wait(20)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        nodes.wait()
        nodes.stdout.close()


def raylet_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def running(what: bytes) -> list[int]:
    """Processes of this test's cluster."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if what in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.option("tensor-parallel-size")
def test_two_nodes_serve_one_model(cluster: dict[str, str], tmp_path: Path) -> None:
    """A worker asks for the one CPU that a node has."""
    env = {**cluster, "RLLM_WORKER_RESOURCES": '{"CPU": 1}'}
    flags = ("--max-model-len", "512", "-tp", "2", "--dtype", "float32")
    with served(smollm2_gguf(), *flags, folder=tmp_path, env=env) as server:
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=120).json()
        assert "Paris" in reply["choices"][0]["message"]["content"]
        found = running(b"RankActor")
        assert len({raylet_of(pid) for pid in found}) == len(found) == 2


@pytest.mark.long
@pytest.mark.option("data-parallel-backend", "data-parallel-size-local")
def test_engines_stay_together_or_are_spread(cluster: dict[str, str], tmp_path: Path) -> None:
    common = ("--max-model-len", "512", "-dp", "2", "--api-server-count", "1")
    for flags, nodes in ((), 1), (("-dpb", "ray", "-dpl", "1"), 2):
        with served(smollm2_gguf(), *common, *flags, folder=tmp_path, env=cluster):
            end = time.monotonic() + 60
            while len(found := running(b"ServeReplica:rayllm:engine")) < 2:
                assert time.monotonic() < end, "waited in vain for two engines"
                time.sleep(0.5)
            assert len({raylet_of(pid) for pid in found}) == nodes
