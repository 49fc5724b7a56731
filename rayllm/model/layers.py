"""Layers written once for any number of ranks, each knowing which shard of a stored tensor is its own.

Letters of shapes: T tokens, D input width, E output width on this rank, V vocabulary on this rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from rayllm.parallel.group import Group
from rayllm_kernels import Ops


class Stored(Protocol):
    """A tensor in a model file, not read yet."""

    name: str
    file: str
    shape: tuple[int, ...]
    kind: str
    """How its numbers are stored, such as `BF16` or `Q4_K`."""

    def read_stored(self, rows: slice) -> Tensor:
        """Rows as they are stored, (rows, bytes) uint8. Only for matrices of quantized kinds."""
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
    group: Group
    keeps: frozenset[str] = frozenset()
    """Quantized kinds that the kernels multiply as they are stored."""

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


def split_evenly(full: int, group: Group) -> Part:
    """The share of a rank, where ranks divide the rows."""
    assert full % group.size == 0, (full, group.size)
    rows = full // group.size
    return Part(full, group.rank * rows, rows)


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

    def __init__(self, place: Placement, in_size: int, out_size: int, bias: bool) -> None:
        super().__init__()
        self.ops, self.group, self.keeps = place.ops, place.group, place.keeps
        self.columns, self.out_size = split_evenly(in_size, place.group), out_size
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
        if kind == "weight" and stored.kind in self.keeps:
            self.quantized[""] = Quantized(stored.kind, stored.read_stored(slice(0, self.out_size)))
            return
        start = self.columns.start
        columns = slice(start, start + self.columns.rows) if kind == "weight" else None
        getattr(self, kind).copy_(stored.read(slice(0, self.out_size), columns))


class VocabTable(Layer):
    """A row for each token, divided among the ranks: the embedding, and the output head with the same rows."""

    def __init__(self, place: Placement, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.ops, self.group, self.vocab_size, self.keeps = place.ops, place.group, vocab_size, place.keeps
        rows = -(-vocab_size // place.group.size)
        self.start = place.group.rank * rows
        self.weight = place.empty(rows, hidden_size)
        if place.group.size > 1:
            self.weight.zero_()  # the last rank may own rows that no token has

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Rows of tokens: (T, D)."""
        if self.group.size == 1:
            return self.ops.embedding(token_ids_T, self.weight)
        local_T = token_ids_T - self.start
        mine_T = (local_T >= 0) & (local_T < len(self.weight))
        rows_TD = self.ops.embedding(torch.where(mine_T, local_T, 0), self.weight)
        return self.group.all_reduce(rows_TD * mine_T.unsqueeze(1))

    def project(self, x_TD: Tensor) -> Tensor:
        """Products with every row, of all ranks: (T, vocabulary) in the dtype of x."""
        return self.group.all_gather(self.ops.linear(x_TD, self.weight))[:, : self.vocab_size]

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        return (self.vocab_size, self.weight.shape[1])

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        end = min(self.start + len(self.weight), self.vocab_size)
        if stored.kind in self.keeps:
            self.quantized[""] = Quantized(stored.kind, stored.read_stored(slice(self.start, end)))
        elif end > self.start:
            self.weight[: end - self.start] = stored.read(slice(self.start, end))


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
        # Where ranks share heads, each of these is counted as often as it is held.
        held = self.part.rows * self.group.size
        mean_T1 = self.group.all_reduce(x.pow(2).sum(-1, keepdim=True)) / held
        weight = self.weight.float() + (1.0 if self.plus_one else 0.0)
        return (x * torch.rsqrt(mean_T1 + self.eps) * weight).to(x_TD.dtype)

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        return (self.part.full,)

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        self.weight.copy_(stored.read(slice(self.part.start, self.part.start + self.part.rows)))
