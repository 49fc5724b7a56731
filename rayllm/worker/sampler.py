"""From logits to tokens. A sample cannot depend on its neighbours in the step.

Order, as users of vLLM expect it: the grammar, allowed tokens, bad words, minimum length, logit bias, penalties, the
user's own processors, the end of reasoning; then the likeliest token, or temperature, min-p, top-k, top-p and a draw.
What grows with the vocabulary or the output is an operation of `rayllm_kernels.sampling`, for all rows at once.
Where a form is all that holds a row, the row's token is chosen as if it were free, and kept if the form allows it, for
the largest of all is then the largest of what is allowed. Only else is the form's mask worked out, and the row chosen
once more.
Shapes: R rows, V vocabulary.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from rayllm.errors import RequestError
from rayllm.messages.ingress import TokenLogprobs
from rayllm.messages.sampling import SamplingParams
from rayllm.structured.grammar import GrammarError
from rayllm.worker.batch import NO_LOGPROBS, RowState, SampleAsk
from rayllm.worker.processors import LogitsProcessor, used_by_all
from rayllm_kernels.sampling import Draws, SamplingOps
from rayllm_kernels.sampling import survivors as survivors  # the very choice that draws make

log = logging.getLogger(__name__)

NEVER = float("-inf")
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Sampled:
    """One token for each row."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By index of the row in this call, where asked for."""
    failed: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Chooses the next token of each row, and reports values of tokens as `mode` (--logprobs-mode) says."""

    def __init__(self, processors: Mapping[str, LogitsProcessor], ops: SamplingOps, mode: str = "raw_logprobs") -> None:
        self._processors = processors
        self._always = used_by_all(processors)
        self._ops = ops
        self.processed = mode.startswith("processed")
        """Whether reported values are those that tokens are drawn from, not the model's own."""
        self._as_logits = mode.endswith("logits")

    def sample(self, logits_RV: torch.Tensor, ask: SampleAsk) -> Sampled:
        """Choose a token for each row of `logits_RV` (float32; may be changed in place)."""
        wanted = np.flatnonzero(ask.logprobs != NO_LOGPROBS)
        changes = np.zeros(len(ask.logprobs), bool)
        changes[[i for i, _ in ask.edited]] = True
        if ask.penalties is not None:
            changes[ask.penalties.at] = True
        # Raw values are those of the model, so rows that change are kept as they were.
        kept = wanted[changes[wanted]] if not self.processed else wanted[:0]
        kept_NV = logits_RV[torch.from_numpy(kept)] if len(kept) else logits_RV
        unmasked = self._unmasked(ask)
        failed = self._process(logits_RV, ask, frozenset(i for i, _ in unmasked))
        tokens = self._ops.choose(logits_RV, ask.draws).numpy()
        failed |= self._choose_again(logits_RV, ask, unmasked, tokens)
        for i, state in ask.edited:
            if tokens[i] < 0 and i not in failed and (self._always or _can_empty(state.sampling)):
                failed[i] = "no token may follow: its constraints together forbid every token"
        tokens = np.maximum(tokens, 0)
        sampled = Sampled(tokens.tolist(), failed=failed)
        if self.processed:
            kept, kept_NV = wanted, shaped(logits_RV, wanted, ask.draws)
            unchanged = wanted[:0]
        else:
            unchanged = wanted[~changes[wanted]]
        for shown_NV, at, rows in ((logits_RV, unchanged, unchanged), (kept_NV, np.arange(len(kept)), kept)):
            counts = ask.logprobs[rows]
            for count in np.unique(counts).tolist():
                these = counts == count
                entries = self._entries(shown_NV, at[these], tokens[rows[these]], count)
                sampled.logprobs.update(zip(rows[these].tolist(), entries, strict=True))
        places = {row: at for at, row in enumerate(kept.tolist())}
        for i, state in ask.edited:
            if (ids := state.sampling.logprob_token_ids) and i in places:
                sampled.logprobs[i] = self._of_tokens(sampled.logprobs[i], kept_NV, places[i], ids)
        return sampled

    def read(
        self, logits_RV: torch.Tensor, next_tokens: npt.NDArray[np.int32], count: int, ask: SampleAsk | None = None
    ) -> list[TokenLogprobs]:
        """Values of given tokens, those of a prompt: entry i is that of `next_tokens[i]` by row i of `logits_RV`.

        Processed values are as if each token had been sampled after those before it, as `ask` asks.
        """
        at = np.arange(len(next_tokens))
        if self.processed:
            assert ask is not None
            self._process(logits_RV, ask)
            logits_RV = shaped(logits_RV, at, ask.draws)
        return self._entries(logits_RV, at, next_tokens.astype(np.int64), count)

    def _of_tokens(self, entry: TokenLogprobs, logits_RV: torch.Tensor, at: int, ids: tuple[int, ...]) -> TokenLogprobs:
        """The same entry with these tokens beside it, the likeliest first."""
        found = self._entries(logits_RV, np.full(len(ids), at), np.array(ids, np.int64), 0)
        found.sort(key=lambda one: one.rank)
        return msgspec.structs.replace(
            entry, top_ids=[one.token_id for one in found], top_logprobs=[one.logprob for one in found],
            top_ranks=[one.rank for one in found],
        )  # fmt: skip

    def _entries(self, logits_RV: torch.Tensor, at_N: Ints, tokens_N: Ints, count: int) -> list[TokenLogprobs]:
        vocab = logits_RV.shape[1]
        found = self._ops.log_probabilities(logits_RV, at_N, tokens_N, vocab if count == -1 else min(count, vocab))
        values_N, top_values_NC = found.logprobs, found.top_values
        if self._as_logits:
            rows_N1 = torch.from_numpy(at_N)[:, None]
            values_N = logits_RV[rows_N1, torch.from_numpy(tokens_N)[:, None]][:, 0].cpu().numpy()
            top_values_NC = logits_RV[rows_N1, torch.from_numpy(found.top_ids)].cpu().numpy()
        return [
            TokenLogprobs(token, value, rank, ids, values)
            for token, value, rank, ids, values in zip(
                tokens_N.tolist(), values_N.tolist(), found.ranks.tolist(), found.top_ids.tolist(),
                top_values_NC.tolist(), strict=True,
            )
        ]  # fmt: skip

    def _unmasked(self, ask: SampleAsk) -> list[tuple[int, RowState]]:
        """Rows whose form can wait until their token is chosen."""
        return [(i, state) for i, state in ask.edited if can_wait(state) and self._may_wait(i, state, ask)]

    def _may_wait(self, i: int, state: RowState, ask: SampleAsk) -> bool:
        """Whether nothing else looks at what the form of a row leaves."""
        sampling, draws = state.sampling, ask.draws
        return not (
            self._always
            or sampling.extra_args
            or sampling.thinking is not None
            or state.num_output < sampling.min_tokens
            or (self.processed and ask.logprobs[i] != NO_LOGPROBS)
            or (draws.temperature[i] and (draws.min_p[i] or draws.top_k[i] or draws.top_p[i] < 1.0))
        )

    def _choose_again(
        self, logits_RV: torch.Tensor, ask: SampleAsk, rows: list[tuple[int, RowState]], tokens: Ints
    ) -> dict[int, str]:
        """Have those rows whose token is forbidden choose among what is not. The rows that failed, and why."""
        wrong = frozenset(forbidden(rows, tokens.tolist()))
        if not wrong:
            return {}
        failed = self._constrain(logits_RV, [(i, state) for i, state in rows if i in wrong])
        at = np.array(sorted(wrong), np.int64)
        tokens[at] = self._ops.choose(logits_RV, ask.draws.of(at)).numpy()
        return failed

    def _process(
        self, logits_RV: torch.Tensor, ask: SampleAsk, unmasked: frozenset[int] = frozenset()
    ) -> dict[int, str]:
        """Apply to each row what its request asks for, but the forms of some. The rows that failed, and why."""
        failed = self._constrain(logits_RV, [(i, state) for i, state in ask.edited if i not in unmasked])
        ends = _ends_of_reasoning(logits_RV, ask.edited)
        _edit(logits_RV, ask.edited)
        if ask.penalties is not None:
            self._ops.penalise(logits_RV, ask.penalties)
        for i, state in ask.edited:
            for name, argument in ({**self._always, **(state.sampling.extra_args or {})}).items():
                prompt = state.tokens[: state.prompt_length].tolist()
                output = state.output.tolist()
                try:
                    logits_RV[i] = self._processors[name](logits_RV[i], prompt, output, argument)
                except Exception as error:  # a user's own code: its fault ends this request and no other
                    log.exception("logits processor %s failed", name)
                    failed[i] = f"the logits processor {name!r} failed: {error}"
        for i, token in ends:
            logits_RV[i] = NEVER
            logits_RV[i, token] = 0.0
        return failed

    def _constrain(self, logits_RV: torch.Tensor, edited: list[tuple[int, RowState]]) -> dict[int, str]:
        """Forbid what the rows' grammars do not allow. Returns the rows that cannot go on, and why."""
        failed: dict[int, str] = {}
        held = [(i, state.output, state.grammar) for i, state in edited if state.grammar is not None]
        if not held:
            return failed
        bits_NW = np.empty((len(held), -(-logits_RV.shape[1] // 32)), np.int32)
        for bits_W, (i, output, grammar) in zip(bits_NW, held, strict=True):
            try:
                grammar.fill(output, bits_W)
            except (GrammarError, RequestError) as error:
                failed[i] = f"the output cannot go on in its form: {error}"
                bits_W.fill(-1)
        self._ops.restrict(logits_RV, np.array([i for i, _, _ in held], np.int64), bits_NW)
        return failed


def can_wait(state: RowState) -> bool:
    """Whether a row has a form that can tell of a token whether it is allowed."""
    return state.grammar is not None and state.grammar.tells


def forbidden(held: list[tuple[int, RowState]], tokens: Sequence[int]) -> list[int]:
    """Those of the rows whose form does not allow their token for certain, where they would be free."""
    found = []
    for i, state in held:
        assert state.grammar is not None
        with contextlib.suppress(GrammarError, RequestError):  # which its mask will tell
            if tokens[i] >= 0 and state.grammar.allows(state.output, tokens[i]):
                continue
        found.append(i)
    return found


def _can_empty(sampling: SamplingParams) -> bool:
    return (
        sampling.allowed_token_ids is not None or sampling.structured_outputs is not None or bool(sampling.extra_args)
    )


def _ends_of_reasoning(logits_RV: torch.Tensor, edited: list[tuple[int, RowState]]) -> list[tuple[int, int]]:
    """Rows whose reasoning is to end now, and the token that goes on with that. A form that holds already is kept."""
    ends = []
    for i, state in edited:
        token = None if state.thinking is None else state.thinking.forced(state.output)
        if token is not None and (state.grammar is None or logits_RV[i, token] > NEVER):
            ends.append((i, token))
    return ends


def _edit(logits_RV: torch.Tensor, edited: list[tuple[int, RowState]]) -> None:
    """Allowed tokens, bad words, minimum length and logit bias, in place, with one call each for all rows."""
    banned: list[tuple[int, Ints]] = []
    biased: list[tuple[int, Ints]] = []
    biases = []
    for i, state in edited:
        sampling = state.sampling
        if sampling.allowed_token_ids is not None:
            allowed = torch.tensor(sampling.allowed_token_ids)
            kept = logits_RV[i, allowed]
            logits_RV[i] = NEVER
            logits_RV[i, allowed] = kept
        if sampling.bad_words_ids:
            banned.append((i, _barred_by_words(state)))
        if state.num_output < sampling.min_tokens and not (state.grammar is not None and state.grammar.must_end):
            banned.append((i, state.end_tokens))
        ids, values = state.bias
        if len(ids):
            biased.append((i, ids))
            biases.append(values)
    if banned:
        logits_RV[_places(banned)] = NEVER
    if biased:
        logits_RV[_places(biased)] += torch.from_numpy(np.concatenate(biases)).to(logits_RV.device)


def _places(ids: list[tuple[int, Ints]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column indices of the ids of some rows."""
    rows = np.repeat([i for i, _ in ids], [len(columns) for _, columns in ids])
    return torch.from_numpy(rows), torch.from_numpy(np.concatenate([columns for _, columns in ids]))


def _barred_by_words(state: RowState) -> Ints:
    """The tokens that would end one of the row's bad words now. A word does not begin in the prompt."""
    barred = []
    for word in state.sampling.bad_words_ids:
        begin = state.length - len(word) + 1
        if begin >= state.prompt_length and tuple(state.tokens[begin : state.length].tolist()) == word[:-1]:
            barred.append(word[-1])
    return np.array(barred, np.int64)


def shaped(logits_RV: torch.Tensor, at_N: Ints, draws: Draws) -> torch.Tensor:
    """Rows `at_N` of the logits as tokens are drawn from them (N, V): divided by the temperature, and minus infinity
    for all that min-p, top-k and top-p leave out. Greedy rows, which draw nothing, as they are.
    """
    shaped_NV = logits_RV[torch.from_numpy(at_N)].cpu()
    for row_V, r in zip(shaped_NV.numpy(), at_N.tolist(), strict=True):
        row_V[np.isnan(row_V)] = NEVER
        if not draws.temperature[r]:
            continue
        with np.errstate(over="ignore"):
            row_V /= draws.temperature[r]
        top = row_V.max()
        if np.isinf(top):
            continue
        ids = survivors(row_V, top, float(draws.min_p[r]), int(draws.top_k[r]), float(draws.top_p[r]))
        left = row_V[ids]
        row_V[:] = NEVER
        row_V[ids] = left
    return shaped_NV
