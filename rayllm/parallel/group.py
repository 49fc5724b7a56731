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
        """Sum over the ranks, the same bits on every rank. May write over `x`.

        On a CPU an element's sum depends on its own terms alone, wherever it stands in `x`.
        """
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Tensors of all ranks, equal in shape, joined in order of rank along `dim`, on every rank."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """`x` of rank `source`, on every rank. Writes over `x` on the others."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Hand `x` to another rank, which receives it."""
        ...

    def receive(self, x: Tensor, source: int) -> Tensor:
        """What rank `source` sends, which has the shape and dtype of `x` and is written over it."""
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

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError("there is no other rank")

    def receive(self, x: Tensor, source: int) -> Tensor:
        raise AssertionError("there is no other rank")


class TorchGroup:
    """A group over `torch.distributed`, which the caller has initialised: gloo on CPU, NCCL on CUDA."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """None takes the group of all processes."""
        self._group = process_group if process_group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.device.type != "cpu":
            dist.all_reduce(x, group=self._group)
            return x
        # gloo adds the terms of an element in an order that depends on its place in the tensor.
        return sum_in_order(self._gathered(x))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._gathered(x.contiguous()), dim=dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        x = x.contiguous()
        dist.broadcast(x, group_src=source, group=self._group)
        return x

    def send(self, x: Tensor, to: int) -> None:
        dist.send(x.contiguous(), group_dst=to, group=self._group)

    def receive(self, x: Tensor, source: int) -> Tensor:
        assert x.is_contiguous()
        dist.recv(x, group_src=source, group=self._group)
        return x

    def _gathered(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._group)
        return parts


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """The sum of tensors from first to last, rounded to their dtype once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)
