"""Collectives of ranks on one machine, through memory that they share: many times faster than sockets."""

import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from rayllm.parallel.group import TorchGroup, sum_in_order
from rayllm_kernels.native.exchange import Exchange
from rayllm_kernels.native.library import library

FOLDER = "/dev/shm"
MOST = 1 << 20
"""Bytes of a rank's part of a turn: larger tensors take several."""
NAME_BYTES = 64


class SharedGroup:
    """A group all of whose ranks are processes of this machine."""

    def __init__(self, plain: TorchGroup, exchange: Exchange) -> None:
        """`plain` is the same group over sockets, for what goes from one rank to another."""
        self.rank, self.size = plain.rank, plain.size
        self._plain, self._exchange = plain, exchange

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return self._exchange.sum(x)
        return sum_in_order(list(self._exchange.gather(x)))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._exchange.gather(x).unbind(0), dim=dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.copy_(self._exchange.gather(x)[source])

    def send(self, x: Tensor, to: int) -> None:
        self._plain.send(x, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        return self._plain.receive(x, source)


def shared_if_near(group: TorchGroup) -> TorchGroup | SharedGroup:
    """The group by shared memory if all its ranks find it and have the kernels, else the group itself. Collective."""
    kernels = library()
    if group.size == 1:
        return group
    name = f"rllm-{os.getpid()}-{secrets.token_hex(16)}".encode().ljust(NAME_BYTES)
    told = group.broadcast(torch.frombuffer(bytearray(name), dtype=torch.uint8))
    path = Path(FOLDER, bytes(told.numpy()).decode().strip())
    memory: mmap.mmap | None = None
    if kernels is not None and group.rank == 0:
        memory = _create(path, Exchange.size(kernels, group.size, MOST))
    made = bool(group.broadcast(torch.tensor([memory is not None])))
    if made and kernels is not None and group.rank:
        memory = _open(path)
    everywhere = bool(group.all_gather(torch.tensor([memory is not None])).all())
    if group.rank == 0:
        path.unlink(missing_ok=True)
    if not everywhere or memory is None:
        return group
    return SharedGroup(group, Exchange(kernels, memory, group.rank, group.size, MOST))


def _create(path: Path, size: int) -> mmap.mmap | None:
    with suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            return mmap.mmap(handle, size)
        finally:
            os.close(handle)
    return None


def _open(path: Path) -> mmap.mmap | None:
    with suppress(OSError), path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
    return None
