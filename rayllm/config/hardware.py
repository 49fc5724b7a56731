"""What the machine has, as far as options depend on it."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine. `memory` is the bytes that are free now, within the limits of the process's container."""

    cpus: int
    memory: int
    cuda: bool = False
    numa_nodes: tuple[int, ...] = (0,)
    numactl: bool = False
    """Whether the program is installed."""


def probe_hardware() -> Hardware:
    """Look at this machine. Does not import torch; a GPU is known by its driver's device files."""
    return Hardware(
        cpus=len(os.sched_getaffinity(0)),
        memory=_free_memory(),
        cuda=Path("/dev/nvidia0").exists(),
        numa_nodes=_numa_nodes(),
        numactl=shutil.which("numactl") is not None,
    )


def _numa_nodes() -> tuple[int, ...]:
    folders = Path("/sys/devices/system/node").glob("node[0-9]*")
    return tuple(sorted(int(folder.name.removeprefix("node")) for folder in folders)) or (0,)


def _free_memory() -> int:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for path in map(Path, CGROUP_LIMITS):
        if path.exists() and (limit := path.read_text(encoding="ascii").strip()).isdigit():
            free = min(free, int(limit))
    return free
