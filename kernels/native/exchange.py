"""What ranks of one machine have, added up or collected, through memory that they share."""

import mmap
from typing import Any

import torch
from torch import Tensor


class Exchange:
    """One rank's end. All ranks call the same methods, with tensors of the same sizes, in the same order."""

    def __init__(self, library: Any, memory: mmap.mmap, rank: int, ranks: int, most: int) -> None:
        """`memory` has the `size` for parts of `most` bytes, larger ones going in pieces, and is zero at first."""
        self._library, self._memory, self._rank, self._ranks, self._most = library, memory, rank, ranks, most
        self._view = torch.frombuffer(memory, dtype=torch.uint8)
        self._turn = 0

    @staticmethod
    def size(library: Any, ranks: int, most: int) -> int:
        """Bytes of memory."""
        size: int = library.rk_exchange_bytes(ranks, most)
        return size

    def gather(self, x: Tensor) -> Tensor:
        """(ranks, *shape of x), of any dtype."""
        x = x.contiguous()
        out = torch.empty(self._ranks, *x.shape, dtype=x.dtype)
        self._turn = self._library.rk_exchange_gather(
            self._view.data_ptr(), self._ranks, self._most, self._rank, self._turn, x.data_ptr(),
            x.numel() * x.element_size(), out.data_ptr(),
        )  # fmt: skip
        return out

    def sum(self, x: Tensor) -> Tensor:
        """The sum of float32 tensors over the ranks, from the first to the last. May be written over `x`."""
        x = x.contiguous()
        assert x.dtype == torch.float32, x.dtype
        self._turn = self._library.rk_exchange_sum(
            self._view.data_ptr(), self._ranks, self._most, self._rank, self._turn, x.data_ptr(), x.numel()
        )
        return x
