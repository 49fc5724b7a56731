"""A model that ranks and stages of this process hold together, with the interface of one decoder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayllm.config.model_facts import read_model_facts
from rayllm.model.compiled import KEPT_KINDS, CompiledDecoder
from rayllm.model.decoder import Decoder
from rayllm.model.loader import load_model
from rayllm.model.moe import HeldOf
from rayllm.parallel.fake import Threads
from rayllm.parallel.group import Group
from rayllm.parallel.ranks import Ranks


def share(path: Path, ranks: Ranks, compiled: bool = False, **more: Any) -> Decoder | CompiledDecoder:
    """What one process holds, float32 unless said otherwise."""
    dtype, keeps = more.pop("dtype", torch.float32), KEPT_KINDS if compiled else frozenset()
    model = load_model(read_model_facts(str(path)), dtype, torch.device("cpu"), ranks, keeps=keeps, **more)
    return CompiledDecoder(model, 1, 512) if compiled else model


class Divided:
    """Stands in for a decoder; every rank of the last stage must give the same logits."""

    def __init__(
        self,
        threads: Threads,
        path: Path,
        stages: int = 1,
        compiled: bool = False,
        held: Callable[[Group], HeldOf] | None = None,
        **more: Any,
    ) -> None:
        """`held` gives the experts of each rank, by its group."""
        self._threads = threads

        def made(rank: int, stage: int) -> Decoder | CompiledDecoder:
            group = threads.groups[rank]
            own = None if held is None else held(group)
            return share(path, Ranks(group, stage, stages), compiled, held=own, **more)

        self.stages = [threads.run(partial(made, stage=stage)) for stage in range(stages)]
        """Models, by stage and rank."""

    def new_caches(self, num_blocks: int, block_size: int) -> list[list[Any]]:
        return [[model.new_caches(num_blocks, block_size) for model in stage] for stage in self.stages]

    def __call__(self, token_ids_T: Tensor, positions_T: Tensor, batch: Any, caches: Any, *more: Any) -> list[Tensor]:
        hidden: list[Any] = [None] * self._threads.size
        for number, (models, held) in enumerate(zip(self.stages, caches, strict=True)):
            # Later stages know how many tokens there are, and not which.
            ids_T = token_ids_T if number == 0 else torch.zeros_like(token_ids_T)
            extra = more or (None,)

            def step(rank: int, models: Any = models, held: Any = held, ids_T: Tensor = ids_T) -> Tensor:
                return models[rank](ids_T, positions_T, batch, held[rank], *extra, hidden[rank]).clone()

            hidden = self._threads.run(step)
        return hidden

    def logits(self, hidden: list[Tensor]) -> Tensor:
        return self._same(self._threads.run(lambda rank: self.stages[-1][rank].logits(hidden[rank])))

    def likeliest(self, hidden: list[Tensor]) -> Tensor:
        return self._same(self._threads.run(lambda rank: self.stages[-1][rank].likeliest(hidden[rank])))

    @staticmethod
    def _same(parts: list[Tensor]) -> Tensor:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]


@contextmanager
def divided(path: Path, ranks: int, stages: int = 1, compiled: bool = False, **more: Any) -> Iterator[Divided]:
    """A model divided so."""
    threads = Threads(ranks)
    try:
        yield Divided(threads, path, stages, compiled, **more)
    finally:
        threads.shutdown()
