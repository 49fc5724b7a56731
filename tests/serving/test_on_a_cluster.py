"""On a Ray cluster of a single CPU that is there already: `serve run`, a handle call, and a joined `rayllm serve`."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.launch import descendants, free_port, is_zombie, served, wait_healthy
from tests.models import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.server, pytest.mark.smollm2]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Environment variables by which commands reach a Ray of one CPU on this machine."""
    folder = Path("/tmp") / f"rllm-test-{os.getpid()}"  # Ray's sockets need a short path
    port = free_port()
    variables = {
        **os.environ,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        "PYTHONPATH": str(ROOT),
    }
    command = [BIN / "ray", "start", "--head", "--block", f"--port={port}", "--num-cpus=1", "--include-dashboard=true",
               f"--dashboard-port={free_port()}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}",
               "--disable-usage-stats", "--object-store-memory=100000000"]  # fmt: skip
    log = tmp_path_factory.mktemp("cluster") / "ray.log"
    with log.open("wb") as out:
        ray = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=variables, cwd=ROOT)
    try:
        wait_for(lambda: "Ray runtime started" in log.read_text(), 60)
        yield {**variables, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        family = [ray.pid, *descendants(ray.pid)]
        ray.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray.wait(20)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def wait_for(condition, timeout_s):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def test_rayllm_serve_joins_a_cluster_and_leaves_it_as_it_was(cluster, tmp_path):
    with served(smollm2_gguf(), "--max-model-len", "512", folder=tmp_path, env=cluster) as server:
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=120).json()
        assert "Paris" in reply["choices"][0]["message"]["content"]
    script = "import ray; ray.init(log_to_driver=False); print(ray.util.list_named_actors(all_namespaces=True))"
    actors = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=cluster, check=True)
    assert actors.stdout.strip() == "[]"


@contextlib.contextmanager
def serve_run(app, cluster, folder, **changes):
    """`serve run` of a file of apps/ with some of its text changed; the URL."""
    port = free_port()
    text = (ROOT / "apps" / app).read_text()
    for old, new in {"port: 8000": f"port: {port}", "models/": f"{smollm2_gguf().parent}/", **changes}.items():
        assert old in text, old
        text = text.replace(old, new)
    config, log = folder / "app.yaml", folder / "serve.log"
    config.write_text(text)
    with log.open("wb") as out:
        command = [BIN / "serve", "run", str(config)]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=cluster, cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_healthy(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        if not is_zombie(process.pid):
            process.kill()
        process.wait()


def test_serve_run_and_a_handle_call(cluster, tmp_path):
    with serve_run("handle_example.yaml", cluster, tmp_path) as url:
        reply = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=120).json()
        assert "Paris" in reply["choices"][0]["message"]["content"]
        assert reply["model"] == "smollm2"
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={**CHAT, "stream": True}, timeout=120) as stream:
            events = [line for line in stream.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        assert any("Paris" in event for event in events)
        answer = httpx.get(f"{url}/capital/?of=France", timeout=120).json()["answer"]
        assert "Paris" in answer
        assert httpx.get(f"{url}/capital/stream?of=France", timeout=120).text == answer


@pytest.mark.long
def test_engines_come_and_go_with_requests(cluster, tmp_path):
    """From none and back, none for a request that was given up; and what an engine does not take is refused."""
    limits = {"ongoing_requests: 32": "ongoing_requests: 2", "queued_requests: 64": "queued_requests: 1"}
    with serve_run("autoscaling.yaml", cluster, tmp_path, **limits) as url:

        def engines():
            text = httpx.get(f"{url}/metrics", timeout=30).text
            return sum(line.startswith("vllm:num_requests_running{") for line in text.splitlines())

        def ask(max_tokens=2, timeout=120, **fields):
            body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, **fields}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=timeout)

        def stays_without_engines(seconds):
            for _ in range(seconds):
                assert engines() == 0
                time.sleep(1)

        stays_without_engines(3)
        assert httpx.get(f"{url}/v1/models").json()["data"]
        with ThreadPoolExecutor(6) as pool:
            assert [reply.status_code for reply in pool.map(lambda _: ask(), range(3))] == [200] * 3
            many = list(pool.map(lambda i: ask(100, stream=i < 3), range(6)))
        assert sorted(reply.status_code for reply in many) == [200] * 3 + [503] * 3
        assert all("which is the limit" in reply.json()["error"]["message"] for reply in many if reply.is_error)
        wait_for(lambda: engines() == 0, 60)
        assert httpx.get(f"{url}/health").status_code == 200
        with contextlib.suppress(httpx.TimeoutException):
            ask(timeout=1)
        time.sleep(20)
        wait_for(lambda: engines() == 0, 60)
        stays_without_engines(10)
