"""Ranks that are threads of one process, to try divided models without processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayllm.parallel.group import sum_in_order

T = TypeVar("T")
WAIT_S = 60.0
"""How long a rank waits for the others."""


class ThreadGroup:
    """One rank of `Threads`."""

    def __init__(self, rank: int, threads: "Threads") -> None:
        self.rank, self.size, self._threads = rank, threads.size, threads

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_order(self._threads.exchange(self.rank, x))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        parts = self._threads.exchange(self.rank, x)
        assert len({part.shape for part in parts}) == 1, [part.shape for part in parts]
        return torch.cat(parts, dim=dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.copy_(self._threads.exchange(self.rank, x)[source])

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError("ranks of threads only meet all together")

    def receive(self, x: Tensor, source: int) -> Tensor:
        raise AssertionError("ranks of threads only meet all together")


class Threads:
    """So many ranks, and the threads that they run on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.groups = [ThreadGroup(rank, self) for rank in range(size)]
        self._parts: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=WAIT_S)
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="rank")

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What `work` gives for each rank, all at once; raises what it raises in the first rank that fails."""

        def one(rank: int) -> T:
            torch.set_num_threads(1)
            try:
                with torch.inference_mode():
                    return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        done = [self._pool.submit(one, rank) for rank in range(self.size)]
        failed = [error for future in done if (error := future.exception()) is not None]
        self._barrier.reset()
        for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in done]

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks, on each of them."""
        self._parts[rank] = x.clone()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def shutdown(self) -> None:
        """End the threads."""
        self._pool.shutdown()
