"""The processes below this one, so that none outlives it."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """One process. Its start time, in clock ticks since boot, tells it from a later one of the same number."""

    pid: int
    started: int


def descendants() -> list[Process]:
    """All processes below this one."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            children.setdefault(int(stat[1]), []).append(Process(int(entry.name), int(stat[19])))
    found: list[Process] = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [process.pid for process in below]
    return found


def end(processes: Iterable[Process], grace_s: float) -> None:
    """Wait for processes to end by themselves, and kill those that have not after `grace_s`."""
    deadline = time.monotonic() + grace_s
    left = [process for process in processes if _runs(process)]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = [process for process in left if _runs(process)]
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    # A killed process is gone once the kernel has taken it apart.
    while any(_runs(process) for process in left):
        time.sleep(POLL_S)


def _runs(process: Process) -> bool:
    stat = _stat(process.pid)
    return stat is not None and int(stat[19]) == process.started and stat[0] != "Z"


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name: state, parent, ...; the start time is number 19."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
