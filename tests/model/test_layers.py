"""Shares of ranks: every row and column is on a rank, none has nothing, and a rank reads no more than its own."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rayllm.config.model_facts import read_model_facts
from rayllm.model import loader
from rayllm.model.compiled import KEPT_KINDS
from rayllm.model.layers import Part, split_evenly, split_heads, split_inner
from rayllm.model.loader import load_model
from rayllm.model.sharded_state import Share
from rayllm.parallel.ranks import Ranks
from tests.model.gguf_writer import write_gguf
from tests.models import make_tiny


def covered(parts: list[Part], full: int) -> list[int]:
    """Rows of each, which follow one another and are all."""
    assert [part.start for part in parts] == [sum(p.rows for p in parts[:i]) for i in range(len(parts))]
    assert sum(part.rows for part in parts) == full == parts[0].full
    return [part.rows for part in parts]


@pytest.mark.parametrize(
    ("full", "unit", "ranks", "sizes"),
    [(7, 1, 1, [7]), (8, 1, 2, [4, 4]), (8, 1, 3, [3, 3, 2]), (80, 16, 3, [32, 32, 16]), (90, 16, 2, [48, 42])],
)
def test_split_evenly(full: int, unit: int, ranks: int, sizes: list[int]) -> None:
    assert covered([split_evenly(full, Share(rank, ranks), unit) for rank in range(ranks)], full) == sizes


@pytest.mark.parametrize(
    ("full", "ranks", "unit"),
    [
        (1536, 2, 256),
        (1536, 4, 32),
        (8960, 2, 256),
        (18944, 8, 256),
        (80, 2, 16),
        (100, 3, 16),
        (20, 5, 1),
        (96, 2, 16),
    ],
)
def test_split_inner(full: int, ranks: int, unit: int) -> None:
    """In blocks of quantized kinds where ranks are about even then."""
    parts = [split_inner(full, Share(rank, ranks)) for rank in range(ranks)]
    sizes = covered(parts, full)
    assert all(part.start % unit == 0 for part in parts)
    assert max(sizes) - min(sizes) <= unit + -full % unit, "the last unit may be short"
    assert min(sizes) > 0


@pytest.mark.parametrize("heads", [(9, 3), (6, 2), (3, 1), (32, 8), (8, 8), (14, 2)])
def test_split_heads(heads: tuple[int, int]) -> None:
    """Queries are on one rank each, with the keys that they look at; these are owned once."""
    size, ratio = 4, heads[0] // heads[1]
    for ranks in range(1, heads[0] + 1):
        parts = [split_heads(*heads, size, Share(rank, ranks)) for rank in range(ranks)]
        assert min(covered([queries for queries, _ in parts], heads[0] * size)) > 0
        for queries, keys in parts:
            for head in range(queries.start // size, (queries.start + queries.rows) // size):
                assert keys.start <= head // ratio * size < keys.start + keys.rows
            assert queries.rows % keys.rows == 0, "every head of keys is for as many queries"
        assert covered([keys for _, keys in parts if keys.owned], heads[1] * size)


def test_heads_of_smollm2() -> None:
    def shares(ranks: int) -> list[tuple[int, int, int]]:
        parts = [split_heads(9, 3, 1, Share(rank, ranks)) for rank in range(ranks)]
        return [(queries.rows, keys.start, keys.rows) for queries, keys in parts]

    assert shares(2) == [(6, 0, 2), (3, 2, 1)]
    assert shares(3) == [(3, 0, 1), (3, 1, 1), (3, 2, 1)]
    assert shares(4) == [(2, 0, 1), (1, 0, 1), (3, 1, 1), (3, 2, 1)]


class Counting:
    """A stored tensor that counts the bytes read of it."""

    def __init__(self, stored: object, counts: Counter[str]) -> None:
        self._stored, self._counts = stored, counts
        self.name, self.file, self.shape, self.kind = stored.name, stored.file, stored.shape, stored.kind

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        part = self._stored.read(rows, columns)
        self._counts[self.name] += part.numel() * part.element_size()
        return part

    def read_stored(self, rows: slice, columns: slice | None = None) -> Tensor:
        part = self._stored.read_stored(rows, columns)
        self._counts[self.name] += part.numel()
        return part


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes read of each tensor from here on."""
    counts: Counter[str] = Counter()
    opened = loader.open_weights

    def counting(*arguments: object) -> object:
        checkpoint, files = opened(*arguments)
        for name, stored in checkpoint.tensors.items():
            checkpoint.tensors[name] = Counting(stored, counts)
        return checkpoint, files

    monkeypatch.setattr(loader, "open_weights", counting)
    return counts


@pytest.mark.parametrize("quantized", [True, False])
def test_a_rank_reads_its_share(tmp_path: Path, counts: Counter[str], quantized: bool) -> None:
    """Norms apart, which each rank holds whole."""
    path = make_tiny("llama", tmp_path / "model", hidden_size=96, intermediate_size=384, head_dim=32, vocab_size=512)
    if quantized:
        path = write_gguf(path, tmp_path / "model.gguf", "llama", "Q8_0")

    def read(ranks: Ranks) -> Counter[str]:
        counts.clear()
        keeps = KEPT_KINDS if quantized else frozenset()
        load_model(read_model_facts(str(path)), torch.float32, torch.device("cpu"), ranks, keeps=keeps)
        return Counter({name: size for name, size in counts.items() if "norm" not in name})

    whole = read(Ranks())
    for size in (2, 3):
        parts = [read(Ranks(Share(rank, size))) for rank in range(size)]
        most = max(part.total() for part in parts)
        assert most < 1.25 * whole.total() / size
        assert sum(part.total() for part in parts) <= 1.1 * whole.total(), "keys alone are on several ranks"
    stages = [read(Ranks(stage=stage, stages=3)) for stage in range(3)]
    assert sum(stages, Counter()) == whole
    assert all(part.keys() & other.keys() == set() for part in stages for other in stages if part is not other)
