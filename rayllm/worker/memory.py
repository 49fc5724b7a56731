"""Host memory: how much this process may still take, and taking it before it is needed."""

import ctypes
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from rayllm.config.engine import EngineConfig

CGROUP = Path("/sys/fs/cgroup")


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int:
    """Bytes that can be allocated without swapping."""
    free = 0
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = _number(cgroup / "memory.max")
    used = _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


MAX_DEFAULT_KV_BYTES = 2 << 30
"""The most that the engines of a host take for KV where the user says nothing: its memory serves other programs too."""


def default_kv_bytes(config: EngineConfig, free: int, block_bytes: int) -> int:
    """Bytes of KV for one engine where none are set: its share of `free`, but no more than is of use.

    That is `MAX_DEFAULT_KV_BYTES` for all engines of the host, or what one request of full length takes; or all of the
    share, where the user set that.
    """
    share = int(free * config.memory_share / config.engines_on_host)
    if config.memory_share_given:
        return share
    step_tokens = config.max_num_batched_tokens
    one_request = config.kv_layout.most_blocks(config.max_model_len, step_tokens, config.block_size) * block_bytes
    return min(share, max(MAX_DEFAULT_KV_BYTES // config.engines_on_host, one_request))


POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: make pages present, keep their content."""
CHUNK_BYTES = 8 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def populate(tensors: Iterable[torch.Tensor], niceness: int = 19) -> threading.Thread:
    """Make the pages of host tensors present, on a background thread that runs when the CPU has nothing else to do.

    Else they would be made one by one in the middle of requests, and the process would seem to grow as it serves.
    Where the system cannot do it, nothing happens.
    """
    regions = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors]
    thread = threading.Thread(target=_populate, args=(regions, niceness), name="rllm-populate", daemon=True)
    thread.start()
    return thread


def _populate(regions: list[tuple[int, int]], niceness: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for address, size in regions:
        begin, end = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
        for at in range(begin, end, CHUNK_BYTES):
            if madvise(at, min(CHUNK_BYTES, end - at), POPULATE_WRITE):
                return
