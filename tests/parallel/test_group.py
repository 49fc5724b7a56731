"""Groups of one, and of two processes over gloo."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rayllm.config.model_facts import read_model_facts
from rayllm.errors import ConfigError
from rayllm.model.loader import load_model
from rayllm.parallel.group import Group, SingleGroup, TorchGroup
from rayllm.parallel.ranks import Ranks
from tests.model.runner import all_logits
from tests.model.test_families import tokens_of
from tests.models import make_tiny


def test_single_is_the_identity() -> None:
    group, x = SingleGroup(), torch.arange(4.0)
    assert (group.rank, group.size) == (0, 1)
    assert all(torch.equal(y, x) for y in (group.all_reduce(x), group.all_gather(x), group.broadcast(x)))


def _enter(rank: int, size: int, meeting: str, work: Callable[[Group, Path], None], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        work(TorchGroup(), Path(folder))
    finally:
        dist.destroy_process_group()


def in_processes(size: int, work: Callable[[Group, Path], None], folder: Path) -> None:
    """Run `work` in so many processes that form a group; fails if it fails in any."""
    mp.spawn(_enter, (size, str(folder / "meeting"), work, str(folder)), nprocs=size, join=True)


def _collectives(group: Group, folder: Path) -> None:
    assert group.size == 2
    x = torch.tensor([[1.0, 2.0]]) * (group.rank + 1)
    assert group.all_gather(x).tolist() == [[1.0, 2.0, 2.0, 4.0]]
    assert group.all_gather(x, dim=0).tolist() == [[1.0, 2.0], [2.0, 4.0]]
    assert group.all_gather(torch.arange(6).view(2, 3).T + group.rank, dim=1).shape == (3, 4)
    assert group.broadcast(x.clone(), source=1).tolist() == [[2.0, 4.0]]
    assert group.all_reduce(x.clone()).tolist() == [[3.0, 6.0]]
    half = torch.tensor([1.5], dtype=torch.bfloat16)
    assert group.all_reduce(half).tolist() == [3.0]


@pytest.mark.slow
def test_collectives(tmp_path: Path) -> None:
    in_processes(2, _collectives, tmp_path)


MODELS = ("llama_biases", "llama_tied", "phi3", "gemma3", "olmo2", "granite", "shared_heads")


def _sharded(group: Group, folder: Path) -> None:
    """Each model, divided among the ranks, gives the logits that it gives whole, on every rank."""
    for name in MODELS:
        facts, prompt = read_model_facts(str(folder / name)), tokens_of(1, 20)
        whole = load_model(facts, torch.float32, torch.device("cpu"))
        part = load_model(facts, torch.float32, torch.device("cpu"), Ranks(group))
        assert part.layers[0].attention.qkv.weight.numel() < whole.layers[0].attention.qkv.weight.numel()
        assert sum(p.numel() for p in part.parameters()) < 0.65 * sum(p.numel() for p in whole.parameters())
        torch.testing.assert_close(
            all_logits(part, prompt, 6), all_logits(whole, prompt), atol=1e-4, rtol=1e-4, msg=lambda m, n=name: n + m
        )


@pytest.mark.slow
def test_sharded_models(tmp_path: Path) -> None:
    for name in MODELS[:-1]:
        make_tiny(name, tmp_path / name)
    # Two ranks that share the one key/value head, with a norm over all heads.
    make_tiny("olmo2", tmp_path / "shared_heads", num_attention_heads=4, num_key_value_heads=1)
    in_processes(2, _sharded, tmp_path)


class Pretended:
    """One rank of a group whose other ranks are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_ranks_that_cannot_divide(tmp_path: Path) -> None:
    facts = read_model_facts(str(make_tiny("llama_odd_heads", tmp_path)))
    with pytest.raises(ConfigError, match="tensor-parallel-size: 4 ranks cannot divide 3 query heads"):
        load_model(facts, torch.float32, torch.device("cpu"), Ranks(Pretended(0, 4)))


def test_shards_join_to_the_whole(tmp_path: Path) -> None:
    """Every row and column of every matrix is on exactly one rank."""
    facts = read_model_facts(str(make_tiny("llama", tmp_path)))
    whole = load_model(facts, torch.float32, torch.device("cpu"))
    parts = [load_model(facts, torch.float32, torch.device("cpu"), Ranks(Pretended(rank, 2))) for rank in range(2)]
    layer, shares = whole.layers[1], [part.layers[1] for part in parts]
    assert torch.equal(torch.cat([s.mlp.down.weight for s in shares], dim=1), layer.mlp.down.weight)
    split = [share.attention.qkv.weight.split([24, 8, 8]) for share in shares]
    joined = [torch.cat(pieces) for pieces in zip(*split, strict=True)]
    assert torch.equal(torch.cat(joined), layer.attention.qkv.weight)
    vocab = torch.cat([part.embed.weight for part in parts])
    assert torch.equal(vocab[:99], whole.embed.weight)
    assert not vocab[99:].any()
