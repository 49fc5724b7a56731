"""From one stage of a pipeline to the next."""

import torch
import torch.distributed as dist
from torch import Tensor


class Pipeline:
    """The ranks at the same place of each stage, in order. A stage computes its next step while one is on its way."""

    def __init__(self, group: dist.ProcessGroup, stage: int) -> None:
        self._group, self._stage = group, stage
        self._on_its_way: tuple[Tensor, dist.Work] | None = None

    def send(self, x: Tensor) -> None:
        """Send a copy of `x` to the next stage, once that has taken the one before."""
        if self._on_its_way is not None:
            self._on_its_way[1].wait()
        copy = x.clone(memory_format=torch.contiguous_format)
        work = dist.isend(copy, group_dst=self._stage + 1, group=self._group)
        assert work is not None
        self._on_its_way = copy, work

    def receive(self, tokens: int, width: int) -> Tensor:
        """What the stage before sends, (tokens, width) float32."""
        x = torch.empty(tokens, width)
        dist.recv(x, group_src=self._stage - 1, group=self._group)
        return x
