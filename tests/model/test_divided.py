"""A model divided among ranks and stages is the model: logits, tokens, and the same bits whatever else is in a step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rayllm.model.compiled import can_divide
from rayllm.model.decoder import Decoder
from rayllm.model.moe import Held, HeldOf
from rayllm.parallel.group import Group
from rayllm.parallel.ranks import Ranks
from rayllm_kernels.native.library import library
from tests.model.divided import divided, share
from tests.model.runner import all_logits, greedy
from tests.model.test_families import LENGTHS, tokens_of
from tests.models import TINY

Tiny = Callable[[str], Path]
needs_kernels = pytest.mark.skipif(library() is None, reason="no C++ compiler here")
DIVISIONS = ((2, 1), (3, 1), (1, 2), (2, 2))
"""(ranks, stages)."""


def check(path: Path, ranks: int, stages: int, compiled: bool, whole: Decoder, prompt: list[int]) -> None:
    """Logits near those of the whole model, and the same greedy tokens, in chunks or not."""
    wanted, tokens = all_logits(whole, prompt), greedy(whole, prompt[:17], 12)
    with divided(path, ranks, stages, compiled) as model:
        got = all_logits(model, prompt, 7)
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)
        assert greedy(model, prompt[:17], 12) == tokens


@pytest.mark.parametrize("name", TINY)
def test_torch_decoders(tiny: Tiny, name: str) -> None:
    whole, prompt = share(tiny(name), Ranks()), tokens_of(1, LENGTHS.get(name, 45))
    for ranks, stages in DIVISIONS:
        check(tiny(name), ranks, stages, False, whole, prompt)


@needs_kernels
@pytest.mark.parametrize("name", TINY)
def test_compiled_decoders(tiny: Tiny, name: str) -> None:
    whole, prompt = share(tiny(name), Ranks(), compiled=True), tokens_of(1, LENGTHS.get(name, 45))
    for ranks, stages in DIVISIONS:
        if can_divide(whole.spec, ranks):
            check(tiny(name), ranks, stages, True, whole, prompt)


class Dealt:
    """The experts of a rank, where ranks take turns, and each has the tokens of all."""

    def __init__(self, group: Group, experts: int) -> None:
        self._group, self.logical = group, list(range(group.rank, experts, group.size))

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mine_TK = ids_TK % self._group.size == self._group.rank
        return x_TD, torch.where(mine_TK, ids_TK // self._group.size, -1), weights_TK

    def combine(self, y_SD: Tensor) -> Tensor:
        return self._group.all_reduce(y_SD)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_experts_that_ranks_hold_whole(tiny: Tiny, name: str, compiled: bool) -> None:
    """Beside attention and shared experts that they divide."""
    path = tiny(name)
    whole, prompt = share(path, Ranks(), compiled), tokens_of(1, 45)
    count = whole.spec.moe.num_experts if whole.spec.moe is not None else 0

    def held(group: Group) -> HeldOf:
        def of_layer(layer: int) -> Held:
            dealt = Dealt(group, count)
            return Held(dealt.logical, dealt)

        return of_layer

    with divided(path, 2, 1, compiled, held=held) as model:
        torch.testing.assert_close(all_logits(model, prompt, 7), all_logits(whole, prompt), atol=2e-4, rtol=1e-4)
