"""Mixtures of experts: the router, this rank's experts, and the block of a layer that both make.

Letters of shapes: T tokens, D width, E experts of the model, K of them for each token, P experts held by this rank, I
inner width of an expert on this rank, F two of that: gate and up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayllm.model.layers import Layer, Part, Placement, Stored, split_inner
from rayllm.model.spec import MoeSpec
from rayllm_kernels import ExpertWeights


def route(logits_TE: Tensor, spec: MoeSpec, correction_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, (T, K) int64, and the weights of their outputs, (T, K) float32.

    `logits_TE` is float32. Of equal scores the lowest expert is chosen, and the lowest group.
    """
    scores_TE = logits_TE.softmax(-1) if spec.scores == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if spec.groups_per_token < spec.groups:
        choice_TE = choice_TE.masked_fill(~_in_best_groups(choice_TE, spec), float("-inf"))
    ids_TK = _best(choice_TE, spec.experts_per_token)
    weights_TK = scores_TE.gather(1, ids_TK)
    if spec.normalised:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * spec.scale


def _in_best_groups(choice_TE: Tensor, spec: MoeSpec) -> Tensor:
    """Whether each expert is in one of its token's groups, (T, E)."""
    grouped = choice_TE.unflatten(1, (spec.groups, -1))
    best = grouped.amax(-1) if spec.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, spec.groups_per_token), True)
    return chosen.repeat_interleave(grouped.shape[2], dim=1)


def _best(scores: Tensor, count: int) -> Tensor:
    """Where the largest of each row stand, the largest first, of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


class Exchange(Protocol):
    """How rows of tokens come to the ranks that hold their experts, and the outputs back."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What this rank's experts compute on, given the experts of this rank's tokens by their logical numbers: rows,
        the places of their experts in this rank's list (negative for those of other ranks), and weights."""
        ...

    def combine(self, y_SD: Tensor) -> Tensor:
        """The sum of what all ranks made of each of this rank's tokens, (T, D), given what this one made of the rows
        that the last `dispatch` gave."""
        ...


class AllHere:
    """The exchange of a rank that holds every expert, or its share of the inner width of every one."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x_TD, ids_TK, weights_TK

    def combine(self, y_SD: Tensor) -> Tensor:
        return y_SD


@dataclass(frozen=True, slots=True)
class Held:
    """The experts of a layer that this rank holds whole: expert parallelism."""

    logical: Sequence[int]
    """Their numbers in the model; one may stand there more than once, and others not at all."""
    exchange: Exchange


HeldOf = Callable[[int], Held]
"""From the number of a layer to its experts on this rank."""


class Router(Layer):
    """Scores of tokens for all experts, whole on every rank and in float32."""

    def __init__(self, place: Placement, spec: MoeSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec, self.hidden_size = spec, hidden_size

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=place.device), requires_grad=False)

        self.weight = empty(spec.num_experts, hidden_size)
        self.bias = empty(spec.num_experts) if spec.router_bias else None
        self.correction = empty(spec.num_experts) if spec.correction else None
        self.kinds = ("weight", "bias") if spec.router_bias else ("weight",)
        self.named = ("correction",) if spec.correction else ()

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """See `route`."""
        return route(functional.linear(x_TD.float(), self.weight, self.bias), self.spec, self.correction)

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        return (self.spec.num_experts, self.hidden_size) if kind == "weight" else (self.spec.num_experts,)

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        getattr(self, kind).copy_(stored.read(slice(None)))


class Experts(Layer):
    """The experts that this rank holds: all of them, the inner width of each divided among the ranks, or a list.

    Checkpoints store the matrices of each expert by themselves, as `expert` fills them, or those of all experts in one
    tensor, each with its inputs as rows: parts `gate+up` side by side, `gate_up` taking turns, or `down`.
    """

    kinds = ()

    def __init__(self, place: Placement, spec: MoeSpec, hidden_size: int, held: Held | None = None) -> None:
        super().__init__()
        self.ops, self.group, self.spec, self.hidden_size = place.ops, place.group, spec, hidden_size
        self.held = held
        self.logical = tuple(range(spec.num_experts) if held is None else held.logical)
        """The number in the model of each expert here."""
        self.exchange = AllHere() if held is None else held.exchange
        size = spec.intermediate_size
        self.inner = split_inner(size, place.group) if held is None else Part(size, 0, size)
        """The share of an expert's inner width that is here."""
        count, inner = len(self.logical), self.inner.rows
        self.gate_up = place.empty(count, 2 * inner, hidden_size)
        self.down = place.empty(count, hidden_size, inner)
        self.gate_up_bias = place.empty(count, 2 * inner) if spec.bias else None
        self.down_bias = place.empty(count, hidden_size) if spec.bias else None
        self.named = ("weight", "bias") if spec.bias else ("weight",)

    @property
    def divided(self) -> bool:
        """Whether what experts put out must be summed over the ranks."""
        return self.held is None and self.group.size > 1

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of the experts of each token, (T, D), on every rank that has the token."""
        x_SD, ids_SK, weights_SK = self.exchange.dispatch(x_TD, ids_TK, weights_TK)
        y_SD = self.ops.experts(x_SD, ids_SK, weights_SK, self.weights(), self.spec.input_scaled)
        y_TD = self.exchange.combine(y_SD)
        return self.group.all_reduce(y_TD) if self.divided else y_TD

    def weights(self) -> ExpertWeights:
        """All of them."""
        spec = self.spec
        return ExpertWeights(
            self.gate_up, self.down, self.gate_up_bias, self.down_bias, spec.activation, spec.alpha, spec.limit
        )

    def let_go(self) -> None:
        """Give the memory of the weights back: they were packed."""
        for parameter in self.parameters():
            parameter.data = parameter.data.new_empty(0)

    def expert(self, logical: int) -> "OneExpert":
        """One expert of the model, held here or not, to be filled."""
        return OneExpert(self, logical)

    def places(self, logical: int) -> list[int]:
        """Where in this rank's list an expert stands."""
        return [place for place, number in enumerate(self.logical) if number == logical]

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        count, width = self.spec.num_experts, self.hidden_size
        inner = self.inner.full * (1 if parts == ("down",) else 2)
        if kind == "bias":
            return (count, width if parts == ("down",) else inner)
        return (count, inner, width) if parts == ("down",) else (count, width, inner)

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        for place, number in enumerate(self.logical):
            self._fill_one(place, kind, parts, stored, slice(number, number + 1))

    def _fill_one(self, place: int, kind: str, parts: tuple[str, ...], stored: Stored, rows: slice) -> None:
        inner = slice(self.inner.start, self.inner.start + self.inner.rows)
        if parts == ("down",):
            if kind == "weight":
                self.down[place] = stored.read(rows, inner)[0].T
            else:
                self.fill_down_bias(place, stored.read(rows)[0])
            return
        both = stored.read(rows)[0]  # (D, F), or (F) of a bias
        gate, up = (both[..., ::2], both[..., 1::2]) if parts == ("gate_up",) else both.chunk(2, dim=-1)
        target = self.gate_up if kind == "weight" else self.gate_up_bias
        assert target is not None
        target[place] = torch.cat((gate[..., inner], up[..., inner]), dim=-1).transpose(0, -1)

    def fill_down_bias(self, place: int, bias_D: Tensor) -> None:
        """Where ranks add up, one of them has it."""
        assert self.down_bias is not None
        self.down_bias[place] = 0.0 if self.divided and self.group.rank else bias_D


class OneExpert:
    """An expert as a checkpoint stores it by itself: parts `gate`, `up` and `down`, each with its outputs as rows."""

    def __init__(self, experts: Experts, logical: int) -> None:
        self._experts, self._places = experts, experts.places(logical)
        self.kinds = experts.named
        self.named: tuple[str, ...] = ()

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        """See `Layer`."""
        inner, width = self._experts.inner.full * len(parts), self._experts.hidden_size
        rows, columns = (width, inner) if parts == ("down",) else (inner, width)
        return (rows, columns) if kind == "weight" else (rows,)

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        """See `Layer`; reads nothing of an expert that is not here."""
        experts = self._experts
        start, count = experts.inner.start, experts.inner.rows
        for place in self._places:
            if parts == ("down",) and kind == "weight":
                experts.down[place] = stored.read(slice(0, experts.hidden_size), slice(start, start + count))
            elif parts == ("down",):
                experts.fill_down_bias(place, stored.read(slice(None)))
            else:
                target = experts.gate_up if kind == "weight" else experts.gate_up_bias
                assert target is not None
                for i, part in enumerate(parts):
                    first = i * experts.inner.full + start
                    at = count if part == "up" else 0
                    target[place, at : at + count] = stored.read(slice(first, first + count))


class Moe(nn.Module):
    """A layer's experts with their router, and perhaps an MLP that every token goes through as well."""

    def __init__(
        self, spec: MoeSpec, hidden_size: int, place: Placement, shared: Any, held: Held | None = None
    ) -> None:
        """`shared` is that `rayllm.model.decoder.Mlp`, if there is one; it adds up over the ranks by itself."""
        super().__init__()
        self.router = Router(place, spec, hidden_size)
        self.experts = Experts(place, spec, hidden_size, held)
        self.shared = shared
        self.shared_gate = SharedGate(place, hidden_size) if spec.shared_gate else None
        self.inner_rows: int = 0 if shared is None else shared.inner_rows
        """Inner width on this rank of what is computed as an MLP."""
        self.routed: Tensor | None = None
        """The experts of the last step's tokens by their logical numbers, (T, K)."""

    def forward(self, x_TD: Tensor) -> Tensor:
        ids_TK, weights_TK = self.router(x_TD)
        self.routed = ids_TK
        y_TD: Tensor = self.experts(x_TD, ids_TK, weights_TK)
        if self.shared is None:
            return y_TD
        shared_TD = self.shared(x_TD)
        return y_TD + (shared_TD if self.shared_gate is None else self.shared_gate(x_TD) * shared_TD)


class SharedGate(Layer):
    """The sigmoid of one product of a token, (T, 1)."""

    def __init__(self, place: Placement, hidden_size: int) -> None:
        super().__init__()
        self.ops, self.weight = place.ops, place.empty(1, hidden_size)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.ops.linear(x_TD, self.weight).sigmoid()

    def stored_shape(self, kind: str, parts: tuple[str, ...]) -> tuple[int, ...]:
        return (1, self.weight.shape[1])

    def fill(self, kind: str, parts: tuple[str, ...], stored: Stored) -> None:
        self.weight.copy_(stored.read(slice(None)))
