"""A group of ranks that hold one sharded model, and its collectives. At size one each is the identity."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Group(Protocol):
    """What layers need of their group. All ranks call the same collectives in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, on every rank. May write over `x`."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Tensors of all ranks, equal in shape, joined in order of rank along `dim`, on every rank."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """`x` of rank `source`, on every rank. Writes over `x` on the others."""
        ...


class SingleGroup:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x


class TorchGroup:
    """A group over `torch.distributed`, which the caller has initialised: gloo on CPU, NCCL on CUDA."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """None takes the group of all processes."""
        self._group = process_group if process_group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._group)
        return torch.cat(parts, dim=dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        x = x.contiguous()
        dist.broadcast(x, group_src=source, group=self._group)
        return x
