"""Starts the real server for a test, on a free port, and ends all of it."""

import contextlib
import functools
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

START_S = 120
STOP_S = 30


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    healthy_s: float
    """From the start of the process to the first healthy answer."""

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that carry these labels."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total += float(value)
        return total

    def family(self) -> list[int]:
        """Process ids of the server and everything below it."""
        return [self.process.pid, *descendants(self.process.pid)]

    def memory(self) -> int:
        """Resident bytes of the whole family."""
        total = 0
        for pid in self.family():
            with contextlib.suppress(OSError, IndexError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total


def answers_http(url: str, trust: ssl.SSLContext | None = None) -> bool:
    """Whether a server answers by HTTP that it is healthy."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5, verify=trust or True).status_code == 200
    return False


@contextlib.contextmanager
def served(
    model: Path | str,
    *flags: str,
    folder: Path,
    env: dict[str, str] | None = None,
    trust: ssl.SSLContext | None = None,
    healthy: Callable[[str], bool] | None = None,
) -> Iterator[Served]:
    """`rayllm serve MODEL flags`, healthy; ended by SIGTERM, after which no process of it may be left.

    `trust` is for flags that ask for HTTPS; `healthy` asks the server, given its URL, by something else than HTTP.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}" if trust is None else f"https://127.0.0.1:{port}"
    log = folder / f"serve-{port}.log"
    command = [sys.executable, "-m", "rayllm", "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})
    family: list[int] = []
    try:
        wait_healthy(url, process, log, healthy or functools.partial(answers_http, trust=trust))
        server = Served(url, process, log, time.monotonic() - began)
        yield server
        family = server.family()
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
        left = [pid for pid in family if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]
        assert not left, f"processes outlive the server: {left}"
    finally:
        family = family or [process.pid, *descendants(process.pid)]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def wait_healthy(
    url: str, process: subprocess.Popen[bytes], log: Path, healthy: Callable[[str], bool] = answers_http
) -> None:
    """Wait for a healthy answer."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended:\n{log.read_text(errors='replace')[-4000:]}"
        if healthy(url):
            return
        time.sleep(0.2)
    raise AssertionError(f"not healthy in {START_S} s:\n{log.read_text(errors='replace')[-4000:]}")


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """Process ids below a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    out, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        out += children
        todo += children
    return out


def is_zombie(pid: int) -> bool:
    """Whether a process has ended and only waits to be collected."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True
