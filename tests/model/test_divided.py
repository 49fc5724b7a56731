"""A model divided among ranks and stages is the model: logits, tokens, and the same bits whatever else is in a step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rayllm.model.compiled import can_divide
from rayllm.model.decoder import Decoder
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
