"""From logits to tokens, in plain numpy and torch. Docstrings here are the contracts of all versions.

Letters of shapes: R rows of logits, V vocabulary, N some of the rows, P the rows with penalties. Logits are float32,
contiguous in their last dimension. NaN counts as minus infinity. What a row gets depends on nothing but the row.
Parameters are numpy arrays on the host, contiguous, one entry a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NEVER = float("-inf")
GAMMA = np.uint64(0x9E3779B97F4A7C15)
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Keys = npt.NDArray[np.uint64]
Bits = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Draws:
    """How the token of each of R rows, or of N of them, is chosen. All arrays but `at` have as many entries."""

    temperature: Floats
    """0: the likeliest token; nothing else of the row matters then."""
    min_p: npt.NDArray[np.float64]
    """Least probability, as a share of the likeliest token's; 0 keeps all."""
    top_k: Ints
    """How many of the likeliest tokens stay; 0 keeps all."""
    top_p: npt.NDArray[np.float64]
    """The mass that the likeliest tokens must reach together; 1 keeps all."""
    key: Keys
    """Of the noise (see `gumbel`)."""
    at: Ints | None = None
    """Which rows of the logits; None: all."""

    def of(self, at_N: Ints) -> "Draws":
        """The same for some of all rows."""
        assert self.at is None
        return replace(
            self, temperature=self.temperature[at_N], min_p=self.min_p[at_N], top_k=self.top_k[at_N],
            top_p=self.top_p[at_N], key=self.key[at_N], at=at_N,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of P rows; all arrays but `tokens` have P entries."""

    at: Ints
    """Which rows of the logits; each once."""
    tokens: npt.NDArray[np.int32]
    """(rows, longest) token ids: a row's prompt, its output, and anything after."""
    held: Ints
    """Which rows of `tokens`."""
    prompt: Ints
    """Tokens in the prompt."""
    length: Ints
    """Tokens in prompt and output."""
    repetition: Floats
    frequency: Floats
    presence: Floats


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Of N tokens, and of the likeliest tokens beside them, in descending order."""

    logprobs: Floats
    """(N)"""
    ranks: Ints
    """(N), 1 for the likeliest."""
    top_ids: Ints
    """(N, count)"""
    top_values: Floats
    """(N, count)"""


def mix(z: Keys) -> Keys:
    """SplitMix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def gumbel(key: int, token_ids: Ints) -> Floats:
    """Gumbel noise, float32, for each of the token ids: argmax(logit + noise) samples from softmax(logit).

    It is made of the upper 24 bits of SplitMix64's output number id + 1 from `key` on, shifted by a half into the open
    interval (0, 1). Versions may differ in the last bit, as logarithms do.
    """
    z = mix(np.uint64(key) + (token_ids.astype(np.uint64) + np.uint64(1)) * GAMMA)
    uniform = ((z >> np.uint64(40)).astype(np.float64) + 0.5) * 2.0**-24
    return (-np.log(-np.log(uniform))).astype(np.float32)


def choose(logits_RV: Tensor, draws: Draws) -> Tensor:
    """One token for each row, or each that `draws.at` names, int64; -1 where no logit is above minus infinity.

    Logits are divided by the temperature, then min-p, top-k and top-p each leave those that reach an edge, so that
    equals at an edge all stay. Top-p counts the mass of what the others left, in descending order, until it reaches
    its share. Of what stays the largest sum with `gumbel` noise is taken, the first of equals. A scaled logit of plus
    infinity is taken before any other.
    """
    rows = (logits_RV if draws.at is None else logits_RV[torch.from_numpy(draws.at)]).cpu().numpy()
    return torch.tensor([_choose(row_V, draws, r) for r, row_V in enumerate(rows)], dtype=torch.int64)


def _choose(logits_V: Floats, draws: Draws, r: int) -> int:
    temperature = draws.temperature[r]
    scaled_V = np.where(np.isnan(logits_V), np.float32(NEVER), logits_V)
    if temperature:
        with np.errstate(over="ignore"):
            scaled_V = scaled_V / temperature
    likeliest = int(np.argmax(scaled_V))
    top = scaled_V[likeliest]
    if top == NEVER:
        return -1
    if not temperature or np.isinf(top):
        return likeliest
    ids = survivors(scaled_V, top, float(draws.min_p[r]), int(draws.top_k[r]), float(draws.top_p[r]))
    return int(ids[np.argmax(scaled_V[ids] + gumbel(int(draws.key[r]), ids))])


def survivors(scaled_V: Floats, top: np.float32, min_p: float, top_k: int, top_p: float) -> Ints:
    """Ids of the tokens that stay, ascending."""
    edge = np.float32(NEVER)
    if min_p:
        edge = top + np.float32(np.log(min_p))
    if 0 < top_k < len(scaled_V):
        edge = max(edge, np.partition(scaled_V, -top_k)[-top_k])
    ids = np.flatnonzero((scaled_V >= edge) & (scaled_V > NEVER))
    if top_p < 1.0:
        values = scaled_V[ids]
        order = np.argsort(-values, kind="stable")
        mass = np.cumsum(np.exp(values[order].astype(np.float64) - float(top)))
        last = min(int(np.searchsorted(mass, top_p * mass[-1])), len(order) - 1)
        ids = ids[values >= values[order[last]]]
    return ids


def restrict(logits_RV: Tensor, at_N: Ints, bits_NW: Bits) -> None:
    """Set to minus infinity, in rows `at_N`, the logits of all tokens whose bit is 0.

    A row of `bits_NW` has a bit for each token, in words of 32, the lowest bit first.
    """
    vocab = logits_RV.shape[1]
    set_NV = np.unpackbits(bits_NW.view(np.uint8), axis=1, count=vocab, bitorder="little")
    barred_NV = torch.from_numpy(set_NV).to(logits_RV.device) == 0
    for at, barred_V in zip(at_N.tolist(), barred_NV, strict=True):
        logits_RV[at].masked_fill_(barred_V, NEVER)


def penalise(logits_RV: Tensor, penalties: Penalties) -> None:
    """Change the penalised rows in place.

    The repetition penalty divides positive and multiplies negative logits of the tokens in prompt and output (Keskar et
    al.: CTRL, 2019). Then the frequency penalty is subtracted for each time that a token stands in the output, and the
    presence penalty once if it does.
    """
    for p, at in enumerate(penalties.at.tolist()):
        row = penalties.tokens[penalties.held[p]]
        prompt, length = int(penalties.prompt[p]), int(penalties.length[p])
        factor = float(penalties.repetition[p])
        if factor != 1.0:
            ids = torch.from_numpy(np.unique(row[:length]).astype(np.int64)).to(logits_RV.device)
            values = logits_RV[at, ids]
            logits_RV[at, ids] = torch.where(values > 0, values / factor, values * factor)
        tokens, counts = np.unique(row[prompt:length], return_counts=True)
        loss = float(penalties.frequency[p]) * counts.astype(np.float64) + float(penalties.presence[p])
        ids = torch.from_numpy(tokens.astype(np.int64)).to(logits_RV.device)
        loss_P = torch.from_numpy(loss).to(logits_RV.device)
        logits_RV[at, ids] = (logits_RV[at, ids].double() - loss_P).float()


def log_probabilities(logits_RV: Tensor, at_N: Ints, tokens_N: Ints, count: int) -> LogProbabilities:
    """Natural logarithms of softmax, without temperature: of token `tokens_N[i]` by row `at_N[i]` of the logits.

    Beside each stand the `count` (up to V) likeliest tokens, the lower id first among equals. A rank counts the
    tokens that are likelier.
    """
    logits_NV = logits_RV[torch.from_numpy(at_N)].cpu()
    logits_NV = torch.where(logits_NV.isnan(), torch.tensor(NEVER), logits_NV)
    tokens_N1 = torch.from_numpy(tokens_N)[:, None]
    logprobs_NV = torch.log_softmax(logits_NV.double(), dim=1).float()
    ranks_N = (logits_NV > logits_NV.gather(1, tokens_N1)).sum(dim=1) + 1
    top_ids = torch.stack([_likeliest(logits_V, count) for logits_V in logits_NV])
    return LogProbabilities(
        logprobs_NV.gather(1, tokens_N1)[:, 0].numpy(), ranks_N.numpy(), top_ids.numpy(),
        logprobs_NV.gather(1, top_ids).numpy(),
    )  # fmt: skip


def _likeliest(logits_V: Tensor, count: int) -> Tensor:
    """The ids of the largest entries, the lower first among equals."""
    if not count:
        return torch.empty(0, dtype=torch.int64)
    ids = torch.nonzero(logits_V >= torch.topk(logits_V, count).values[-1])[:, 0]
    return ids[torch.argsort(logits_V[ids], descending=True, stable=True)[:count]]


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """One version of each operation above."""

    choose: Callable[[Tensor, Draws], Tensor]
    restrict: Callable[[Tensor, Ints, Bits], None]
    penalise: Callable[[Tensor, Penalties], None]
    log_probabilities: Callable[[Tensor, Ints, Ints, int], LogProbabilities]


REFERENCE = SamplingOps(choose, restrict, penalise, log_probabilities)
