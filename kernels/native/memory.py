"""Memory for weights and caches, in huge pages where the system gives them.

Kernels that stream gigabytes through small pages spend much of their time finding these.
"""

import contextlib
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
LINE = 64
REGION = 64 << 20


def zeros(size: int) -> Tensor:
    """(size) uint8 zeros that begin on a huge page. Pages are made present as they are used."""
    room = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            room.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + size]


class Arena:
    """Hands out memory from large regions, each of which is given back when all that lies in it is gone."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """(size) uint8, in whole cache lines of its own."""
        rounded = -(-size // LINE) * LINE
        if rounded > len(self._region):
            self._region = zeros(max(rounded, REGION))
        taken, self._region = self._region[:size], self._region[rounded:]
        return taken
