"""Layers written once for any number of ranks, each knowing which shard of a stored tensor is its own.

Letters of shapes: T tokens, D input width, E output width on this rank, V vocabulary on this rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from rayllm.config.gguf_file import BLOCKS
from rayllm.parallel.group import Group
from rayllm.parallel.ranks import Ranks
from rayllm_kernels import Ops


class Stored(Protocol):
    """A tensor in a model file, not read yet."""

    name: str
    file: str
    shape: tuple[int, ...]
    kind: str
    """How its numbers are stored, such as `BF16` or `Q4_K`."""

    def read_stored(self, rows: slice, columns: slice | None = None) -> Tensor:
        """Rows as they are stored, (rows, bytes) uint8, or whole blocks of them. For matrices of quantized kinds."""
        ...

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        """Read a part of it, on the CPU, in whatever floating dtype it is stored or dequantized to.

        A tensor without dimensions is read whole.
        """
        ...


@dataclass(frozen=True, slots=True)
class Embedded:
    """Tokens of a step that come as embeddings, as the embedding of transformers would give them."""

    at_N: Tensor
    """Where they stand in the step."""
    rows_ND: Tensor
    """float32, on the CPU."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What every layer is made with."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    keeps: frozenset[str] = frozenset()
    """Quantized kinds that the kernels multiply as they are stored."""

    @property
    def group(self) -> Group:
        """The ranks that divide a layer."""
        return self.ranks.tensor

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter yet to be filled."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True, slots=True)
class Part:
    """A named run of output rows of a layer, and the share of it that lies on this rank."""

    full: int
    """Rows in the checkpoint."""
    start: int
    """First of them on this rank."""
    rows: int
    """How many on this rank."""
    owned: bool = True
    """Whether no rank before this one holds the same rows."""


def split_evenly(full: int, group: Group, unit: int = 1) -> Part:
    """The share of a rank in whole units, of which the first ranks have one more where ranks do not divide them.

    The last unit may be cut short.
    """
    start, count = _run(-(-full // unit), group.rank, group.size)
    end = min((start + count) * unit, full)
    return Part(full, start * unit, end - start * unit)


def split_heads(heads: int, kv_heads: int, head_size: int, group: Group) -> tuple[Part, Part]:
    """Rows of queries and of keys (or values) on a rank, in whole heads, of which it has one of each at least.

    Ranks divide the key/value heads, and take the query heads that go with theirs; where these are fewer than ranks,
    several hold the same one and divide its query heads.
    """
    assert group.size <= heads, (group.size, heads)
    ratio = heads // kv_heads
    if group.size <= kv_heads:
        key, keys = _run(kv_heads, group.rank, group.size)
        query, queries, owned = key * ratio, keys * ratio, True
    else:
        key, keys = next((h, 1) for h in range(kv_heads) if group.rank < sum(_run(group.size, h, kv_heads)))
        first, sharers = _run(group.size, key, kv_heads)
        query, queries = _run(ratio, group.rank - first, sharers)
        query, owned = key * ratio + query, group.rank == first
    return (
        Part(heads * head_size, query * head_size, queries * head_size),
        Part(kv_heads * head_size, key * head_size, keys * head_size, owned),
    )


def split_inner(full: int, group: Group) -> Part:
    """A rank's share of the inner width of an MLP.

    In blocks of quantized kinds where shares are near enough in size then, else in panels of the kernels.
    """
    for unit in (256, 32):
        units = full // unit
        if full % unit == 0 and (units % group.size == 0 or units >= 8 * group.size):
            return split_evenly(full, group, unit)
    return split_evenly(full, group, 16 if -(-full // 16) >= group.size else 1)


def _run(count: int, index: int, of: int) -> tuple[int, int]:
    """(start, length) of one of so many runs that divide `count` things; the first ones are longer by one."""
    each, over = divmod(count, of)
    return index * each + min(index, over), each + (index < over)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows of a weight matrix as they are stored."""

    kind: str
    rows: Tensor
    """(rows, bytes) uint8."""


class Layer(nn.Module, ABC):
    """A layer that a checkpoint fills: for each of `kinds`, from one tensor or one for each part."""

    kinds: tuple[str, ...] = ("weight",)
    """Parameters it has: `weight`, and perhaps `bias`."""
    named: tuple[str, ...] = ()
    """Parameters whose tensors do not end with `.weight` or `.bias`."""

    def __init__(self) -> None:
        super().__init__()
        self.quantized: dict[str, Quantized] = {}
        """By part, what stays as it is stored; the weight does not hold it then."""

    @abstractmethod
    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        """Shape that a checkpoint must store `parts` in, joined along the first dimension."""

    @abstractmethod
    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        """Copy this rank's share of `stored`, whose shape was checked."""


class ColumnLinear(Layer):
    """Linear layer whose output features are divided among the ranks; several may be joined into one product."""

    def __init__(self, place: Placement, in_size: int, parts: Mapping[str, Part], bias: bool) -> None:
        super().__init__()
        self.ops, self.in_size, self.parts, self.keeps = place.ops, in_size, dict(parts), place.keeps
        self.sizes = [part.rows for part in parts.values()]
        """Output features of each part on this rank."""
        self.weight = place.empty(sum(self.sizes), in_size)
        self.bias = place.empty(sum(self.sizes)) if bias else None
        self.kinds = ("weight", "bias") if bias else ("weight",)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.ops.linear(x_TD, self.weight, self.bias)

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        rows = sum(self.parts[name].full for name in parts)
        return (rows, self.in_size) if kind == "weight" else (rows,)

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        offsets = dict(zip(self.parts, [sum(self.sizes[:i]) for i in range(len(self.sizes))], strict=True))
        first = 0
        for name in parts:
            part, offset = self.parts[name], offsets[name]
            start = first + part.start
            rows = slice(start, start + part.rows)
            if kind == "weight" and stored.kind in self.keeps:
                self.quantized[name] = Quantized(stored.kind, stored.read_stored(rows))
            else:
                getattr(self, kind)[offset : offset + part.rows] = stored.read(rows)
            first += part.full


class RowLinear(Layer):
    """Linear layer whose input features are divided among the ranks; the sum over ranks is on every rank."""

    def __init__(self, place: Placement, in_size: int, out_size: int, bias: bool, columns: Part | None = None) -> None:
        """`columns` are the features on this rank, by default those of `split_evenly`."""
        super().__init__()
        self.ops, self.group, self.keeps = place.ops, place.group, place.keeps
        self.columns, self.out_size = columns or split_evenly(in_size, place.group), out_size
        self.weight = place.empty(out_size, self.columns.rows)
        self.bias = place.empty(out_size) if bias else None
        self.kinds = ("weight", "bias") if bias else ("weight",)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.group.size == 1:
            return self.ops.linear(x_TD, self.weight, self.bias)
        out_TE = self.group.all_reduce(self.ops.linear(x_TD, self.weight))
        return out_TE if self.bias is None else out_TE + self.bias

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        return (self.out_size, self.columns.full) if kind == "weight" else (self.out_size,)

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        rows, start, count = slice(0, self.out_size), self.columns.start, self.columns.rows
        columns = slice(start, start + count) if kind == "weight" else None
        if columns is not None and stored.kind in self.keeps and not (start | count) % BLOCKS[stored.kind][1]:
            self.quantized[""] = Quantized(stored.kind, stored.read_stored(rows, columns))
        else:
            getattr(self, kind).copy_(stored.read(rows, columns))


def own_tokens(token_ids_T: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """(the row of each token in a run of the table, or 0 where it has none; whether it has one)."""
    local_T = token_ids_T - start
    mine_T = (local_T >= 0) & (local_T < count)
    return torch.where(mine_T, local_T, 0), mine_T


class VocabTable(Layer):
    """A row for each token, divided among the ranks: the embedding, and the output head with the same rows."""

    def __init__(self, place: Placement, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.ops, self.group, self.vocab_size, self.keeps = place.ops, place.group, vocab_size, place.keeps
        rows = -(-vocab_size // place.group.size)
        self.start = place.group.rank * rows
        self.held = min(rows, vocab_size - self.start)
        """Rows on this rank that a token has; the last rank may have others."""
        self.weight = place.empty(rows, hidden_size)
        self.weight[self.held :].zero_()

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Rows of tokens: (T, D)."""
        if self.group.size == 1:
            return self.ops.embedding(token_ids_T, self.weight)
        local_T, mine_T = own_tokens(token_ids_T, self.start, self.held)
        return self.group.all_reduce(self.ops.embedding(local_T, self.weight) * mine_T.unsqueeze(1))

    def project(self, x_TD: Tensor) -> Tensor:
        """Products with every row, of all ranks: (T, vocabulary) in the dtype of x."""
        return self.group.all_gather(self.ops.linear(x_TD, self.weight))[:, : self.vocab_size]

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        return (self.vocab_size, self.weight.shape[1])

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        rows = slice(self.start, self.start + self.held)
        if stored.kind in self.keeps:
            self.quantized[""] = Quantized(stored.kind, stored.read_stored(rows))
        else:
            self.weight[: self.held] = stored.read(rows)


class Norm(Layer):
    """RMS norm over the last dimension, whole on every rank."""

    def __init__(self, place: Placement, size: int, eps: float, plus_one: bool) -> None:
        super().__init__()
        self.ops, self.eps, self.plus_one = place.ops, eps, plus_one
        self.weight = place.empty(size)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.ops.rms_norm(x_TD, self.weight, self.eps, self.plus_one)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)."""
        return self.ops.add_rms_norm(x_TD, residual_TD, self.weight, self.eps, self.plus_one)

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        return (len(self.weight),)

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        self.weight.copy_(stored.read(slice(None)))


class Sinks(Layer):
    """A number for each query head of this rank."""

    kinds, named = (), ("weight",)

    def __init__(self, place: Placement, part: Part) -> None:
        super().__init__()
        self.part, self.weight = part, place.empty(part.rows)

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        return (self.part.full,)

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        self.weight.copy_(stored.read(slice(self.part.start, self.part.start + self.part.rows)))


class SplitNorm(Layer):
    """RMS norm over features that are divided among the ranks."""

    def __init__(self, place: Placement, part: Part, eps: float, plus_one: bool) -> None:
        super().__init__()
        self.ops, self.group, self.part, self.eps, self.plus_one = place.ops, place.group, part, eps, plus_one
        self.weight = place.empty(part.rows)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.group.size == 1:
            return self.ops.rms_norm(x_TD, self.weight, self.eps, self.plus_one)
        x = x_TD.float()
        squares_T1 = x.pow(2).sum(-1, keepdim=True) * self.part.owned  # heads that ranks share are counted once
        mean_T1 = self.group.all_reduce(squares_T1) / self.part.full
        weight = self.weight.float() + (1.0 if self.plus_one else 0.0)
        return (x * torch.rsqrt(mean_T1 + self.eps) * weight).to(x_TD.dtype)

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        return (self.part.full,)

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        self.weight.copy_(stored.read(slice(self.part.start, self.part.start + self.part.rows)))
