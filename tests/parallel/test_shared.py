"""Ranks that share memory: the sums and parts of the plain group, for any size and in any order of arrival."""

import random
import time
from pathlib import Path

import pytest
import torch

from rayllm.parallel import shared
from rayllm.parallel.group import Group, TorchGroup
from rayllm.parallel.shared import SharedGroup, shared_if_near
from rayllm_kernels.native.library import library
from tests.parallel.test_group import in_processes

pytestmark = pytest.mark.slow
RANKS = 3


def _agree(group: Group, folder: Path) -> None:
    assert isinstance(group, TorchGroup)
    shared.MOST = 4096
    near = shared_if_near(group)
    assert isinstance(near, SharedGroup)
    assert not list(Path(shared.FOLDER).glob(f"rllm-{group.rank}-*"))
    draw, lag = random.Random(5), random.Random(group.rank)
    for turn in range(300):
        shape = (draw.randrange(1, 60), draw.randrange(1, 90))
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool])
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(turn * RANKS + group.rank)) * 100).to(dtype)
        if lag.random() < 0.05:
            time.sleep(0.003)
        if dtype.is_floating_point:
            assert torch.equal(near.all_reduce(x.clone()), group.all_reduce(x.clone()))
            assert torch.equal(near.all_reduce(x.clone().T), group.all_reduce(x.clone().T))
        dim = draw.choice([0, 1, -1])
        assert torch.equal(near.all_gather(x, dim), group.all_gather(x, dim))
        assert torch.equal(near.broadcast(x.clone(), turn % RANKS), group.broadcast(x.clone(), turn % RANKS))


@pytest.mark.skipif(library() is None, reason="no C++ compiler here")
def test_as_by_sockets(tmp_path: Path) -> None:
    in_processes(RANKS, _agree, tmp_path)


def _apart(group: Group, folder: Path) -> None:
    assert isinstance(group, TorchGroup)
    if group.rank == 1:
        shared.FOLDER = str(folder / "elsewhere")
    assert shared_if_near(group) is group


def test_ranks_that_share_no_memory_keep_to_sockets(tmp_path: Path) -> None:
    in_processes(2, _apart, tmp_path)
