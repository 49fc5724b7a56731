"""From logits to tokens. Each row is chosen by itself, so that a sample cannot depend on its neighbours.

Order, as users of vLLM expect it: allowed tokens, bad words, minimum length, logit bias, penalties, the user's own
processors; then the likeliest token, or temperature, min-p, top-k, top-p and a draw.
Shapes: R rows, V vocabulary.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rayllm.messages.ingress import TokenLogprobs
from rayllm.messages.sampling import SamplingParams
from rayllm.worker.batch import RowState
from rayllm.worker.noise import gumbel, noise_key
from rayllm.worker.processors import LogitsProcessor

log = logging.getLogger(__name__)

NEVER = float("-inf")


@dataclass(slots=True)
class Sampled:
    """One token for each row."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By index of the row in this call, where asked for."""
    failed: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Chooses the next token of each row."""

    def __init__(
        self, processors: Mapping[str, LogitsProcessor], argmax: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """`argmax` gives the index of the largest entry of each row, where there is a faster way than torch's."""
        self._processors = processors
        self._argmax = argmax or (lambda logits_RV: torch.argmax(logits_RV, dim=-1))

    def sample(self, logits_RV: torch.Tensor, states: list[RowState]) -> Sampled:
        """Choose a token for each row of `logits_RV` (float32; may be changed in place)."""
        wanted = [i for i, state in enumerate(states) if state.sampling.logprobs is not None]
        raw = {i: torch.log_softmax(logits_RV[i], dim=-1) for i in wanted}
        failed = self._process(logits_RV, states)
        token_ids: list[int] = self._argmax(logits_RV).tolist()
        for i, state in enumerate(states):
            if not state.sampling.greedy and i not in failed:
                token_ids[i] = draw(logits_RV[i], state)
        sampled = Sampled(token_ids, failed=failed)
        for i, logprobs_V in raw.items():
            count = states[i].sampling.logprobs
            assert count is not None
            sampled.logprobs[i] = _entries(logprobs_V[None], [token_ids[i]], count)[0]
        return sampled

    def _process(self, logits_RV: torch.Tensor, states: list[RowState]) -> dict[int, str]:
        """Apply to each row what its request asks for. Returns the rows that cannot go on, and why."""
        failed = {}
        for i, state in enumerate(states):
            if state.plain:
                continue
            apply_constraints(logits_RV[i], state)
            for name, argument in (state.sampling.extra_args or {}).items():
                try:
                    prompt = state.tokens[: state.prompt_length].tolist()
                    output = state.tokens[state.prompt_length : state.length].tolist()
                    logits_RV[i] = self._processors[name](logits_RV[i], prompt, output, argument)
                except Exception as error:  # a user's own code: its fault ends this request and no other
                    log.exception("logits processor %s failed", name)
                    failed[i] = f"the logits processor {name!r} failed: {error}"
            if i not in failed and _can_empty(state.sampling) and not bool((logits_RV[i] > NEVER).any()):
                failed[i] = "no token may follow: its constraints together forbid every token"
        return failed


def _can_empty(sampling: SamplingParams) -> bool:
    return sampling.allowed_token_ids is not None or bool(sampling.extra_args)


def apply_constraints(logits_V: torch.Tensor, state: RowState) -> None:
    """Change one row of logits in place by everything its sampling parameters say, up to the temperature."""
    sampling = state.sampling
    if sampling.allowed_token_ids is not None:
        allowed = torch.tensor(sampling.allowed_token_ids)
        kept = logits_V[allowed]
        logits_V.fill_(NEVER)
        logits_V[allowed] = kept
    for word in sampling.bad_words_ids:
        head, last = word[:-1], word[-1]
        begin = state.length - len(head)
        if begin >= state.prompt_length and state.tokens[begin : state.length].tolist() == list(head):
            logits_V[last] = NEVER
    if state.num_output < sampling.min_tokens and state.end_tokens:
        logits_V[list(state.end_tokens)] = NEVER
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias))
        logits_V[ids] += torch.tensor(list(sampling.logit_bias.values()))
    _penalise(logits_V, state, sampling)


def _penalise(logits_V: torch.Tensor, state: RowState, sampling: SamplingParams) -> None:
    if sampling.repetition_penalty != 1.0:
        assert state.distinct is not None
        seen = np.union1d(state.distinct, np.fromiter(state.output_counts, np.int64, len(state.output_counts)))
        ids = torch.from_numpy(seen)
        values = logits_V[ids]
        factor = sampling.repetition_penalty
        logits_V[ids] = torch.where(values > 0, values / factor, values * factor)
    if state.output_counts and (sampling.frequency_penalty or sampling.presence_penalty):
        ids = torch.tensor(list(state.output_counts))
        counts = torch.tensor(list(state.output_counts.values()), dtype=torch.float32)
        logits_V[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def draw(logits_V: torch.Tensor, state: RowState) -> int:
    """One token by temperature, min-p, top-k and top-p, with noise that belongs to this token alone."""
    sampling = state.sampling
    assert sampling.seed is not None
    scaled_V = logits_V.numpy() / np.float32(sampling.temperature)
    keep = _survivors(scaled_V, sampling)
    ids = np.arange(len(scaled_V)) if keep is None else keep
    noise = gumbel(noise_key(sampling.seed, state.choice_index, state.length), ids)
    scores = scaled_V + noise if keep is None else scaled_V[keep] + noise
    return int(ids[np.argmax(scores)])


def _survivors(scaled_V: npt.NDArray[np.float32], sampling: SamplingParams) -> npt.NDArray[np.int64] | None:
    """Ids of the tokens that min-p, top-k and top-p leave, ascending; None for all. Equals at an edge all stay."""
    if not sampling.min_p and sampling.top_k <= 0 and sampling.top_p >= 1.0:
        return None
    edge = np.float32(NEVER)
    top = scaled_V.max()
    if sampling.min_p:
        edge = top + np.float32(np.log(sampling.min_p))
    if 0 < sampling.top_k < len(scaled_V):
        edge = max(edge, np.partition(scaled_V, -sampling.top_k)[-sampling.top_k])
    ids = np.flatnonzero((scaled_V >= edge) & (scaled_V > NEVER))
    if sampling.top_p < 1.0:
        values = scaled_V[ids]
        order = np.argsort(-values, kind="stable")
        weights = np.exp(values[order].astype(np.float64) - float(top))
        mass = np.cumsum(weights) / weights.sum()
        last = min(int(np.searchsorted(mass, sampling.top_p)), len(order) - 1)
        ids = ids[values >= values[order[last]]]
    return ids


def prompt_logprobs(logits_RV: torch.Tensor, next_tokens: npt.NDArray[np.int32], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens: entry i is that of `next_tokens[i]` by row i of `logits_RV`."""
    return _entries(torch.log_softmax(logits_RV, dim=-1), next_tokens.tolist(), count)


def _entries(logprobs_RV: torch.Tensor, token_ids: list[int], count: int) -> list[TokenLogprobs]:
    vocab = logprobs_RV.shape[1]
    chosen_R1 = logprobs_RV.gather(1, torch.tensor(token_ids)[:, None])
    ranks = ((logprobs_RV > chosen_R1).sum(dim=1) + 1).tolist()
    top = torch.topk(logprobs_RV, vocab if count == -1 else min(count, vocab), dim=1)
    return [
        TokenLogprobs(token, value, rank, ids, values)
        for token, value, rank, ids, values in zip(
            token_ids, chosen_R1[:, 0].tolist(), ranks, top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]
