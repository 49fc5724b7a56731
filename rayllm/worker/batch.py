"""The state of the batch, a row for each running request, and the tensors that a step makes of it.

Everything a step needs of all rows lies in arrays, so that a step of many rows costs a fixed number of numpy calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from rayllm.messages.sampling import SamplingParams
from rayllm.messages.worker import StartRow, StepPlan
from rayllm.model.layers import Embedded
from rayllm.structured.row import RowGrammar
from rayllm.worker.cascade import find_shared_prefix
from rayllm.worker.noise import noise_keys, stream_key
from rayllm.worker.thinking import ThinkingLimit
from rayllm_kernels import AttentionBatch
from rayllm_kernels.batch import to_device
from rayllm_kernels.sampling import Draws, Penalties

Ints = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]
"""Numbers of rows."""
NO_LOGPROBS = -2


@dataclass(slots=True)
class RowState:
    """What belongs to one row alone: for the few things that are done row by row."""

    row: int
    sampling: SamplingParams
    prompt_length: int
    tokens: Ints
    """The whole row; `tokens[:length]` is valid."""
    end_tokens: npt.NDArray[np.int64]
    """Tokens that may not come before `min_tokens`."""
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
    """Token ids, and what is added to their logits."""
    known: Ints
    """One entry of the batch's array: `length`."""
    grammar: RowGrammar | None
    """What the output must follow."""
    thinking: ThinkingLimit | None
    """What ends its reasoning."""

    @property
    def length(self) -> int:
        """Prompt and output known so far; the position of the token to sample."""
        return int(self.known[0])

    @property
    def output(self) -> Ints:
        """Output tokens so far."""
        return self.tokens[self.prompt_length : self.length]

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return self.length - self.prompt_length


@dataclass(frozen=True, slots=True)
class SampleAsk:
    """What R rows ask of the sampler."""

    draws: Draws
    penalties: Penalties | None
    edited: list[tuple[int, RowState]]
    """Rows whose logits are changed one by one, and where in R they stand."""
    logprobs: npt.NDArray[np.int32]
    """(R) as in `SamplingParams`; `NO_LOGPROBS` for none."""


@dataclass(frozen=True, slots=True)
class PromptAsk:
    """A row that wants log-probabilities of the prompt tokens after those in this step."""

    row: int
    offset: int
    """Where the row's tokens begin in the step."""
    next_tokens: Ints
    position: int
    """Of the first of them in the prompt."""
    alternatives: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step as the model takes it: T tokens of B rows."""

    token_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64
    attention: AttentionBatch
    rows: Rows  # (B,)
    counts: Ints  # (B,)
    starts: Ints  # (B,) tokens computed before this step
    sampled_rows: Rows  # (R,)
    sampled_positions: torch.Tensor  # (R,) int64, indices into T
    embedded: Embedded | None  # tokens that come as embeddings


class Batch:
    """Owns the rows."""

    def __init__(
        self,
        *,
        rows: int,
        max_tokens: int,
        block_size: int,
        vocab_size: int,
        end_tokens: Sequence[int],
        edits_all: bool = False,
        groups: int = 1,
        cascade_groups: int = 0,
        follow: Callable[[SamplingParams], RowGrammar | None] = lambda sampling: None,
    ) -> None:
        """`edits_all` says that the logits of every row are changed, whatever its request asks for.

        `groups` of layers have blocks of their own. The first `cascade_groups` see everything: where it is worthwhile,
        their attention over what requests share is computed once. `follow` gives what holds an output to a form.
        """
        self._groups, self._cascade_groups = groups, cascade_groups
        self._follow = follow
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._end_tokens = tuple(end_tokens)
        # One more than the context holds: a step in flight may sample past the end of a request.
        self._tokens = np.zeros((rows, max_tokens + 1), np.int32)
        self._length = np.zeros(rows, np.int32)
        self._computed = np.zeros(rows, np.int32)
        self._blocks = np.zeros((rows, -(-(max_tokens + 1) // block_size) * groups), np.int32)
        self._num_blocks = np.zeros(rows, np.int32)
        self._state: list[RowState | None] = [None] * rows
        self._embeds: dict[int, npt.NDArray[np.float32]] = {}
        """By row: what stands in place of its prompt's tokens, until these are computed."""
        self._sampling = _SamplingArrays(rows, edits_all)

    def apply(self, plan: StepPlan) -> None:
        """Take in what changed since the last step."""
        for start in plan.start:
            self._start(start)
        for row, blocks in plan.grown:
            begin = self._num_blocks[row]
            self._blocks[row, begin : begin + len(blocks)] = blocks
            self._num_blocks[row] = begin + len(blocks)

    def inputs(self, plan: StepPlan, device: torch.device) -> StepInputs:
        """The tensors of a step."""
        rows, counts = np.array(plan.rows, np.int64), np.array(plan.counts, np.int32)
        starts = self._computed[rows]
        seq_lens = starts + counts
        ends = np.cumsum(counts, dtype=np.int32)
        if ends[-1] == len(rows):  # one token each
            token_rows, positions = rows, starts.astype(np.int64)
        else:
            token_rows = np.repeat(rows, counts)
            positions = np.arange(ends[-1]) + np.repeat(starts + counts - ends, counts)
        blocks, offsets = np.divmod(positions, self._block_size)
        query_start = np.zeros(len(rows) + 1, np.int32)
        query_start[1:] = ends
        table = self._blocks[rows, : -(-int(seq_lens.max()) // self._block_size) * self._groups]
        if self._groups > 1:
            table = table.reshape(len(rows), -1, self._groups).transpose(2, 0, 1)
            blocks = blocks * self._groups + np.arange(self._groups)[:, None]
        shared = None
        if self._cascade_groups:
            tables = table if self._groups > 1 else table[None]
            shared = find_shared_prefix(tables[: self._cascade_groups], counts, seq_lens, self._block_size)
        attention = AttentionBatch.from_numpy(
            query_start=query_start, seq_lens=seq_lens, block_table=table, shared=shared,
            slot_mapping=self._blocks[token_rows, blocks] * np.int64(self._block_size) + offsets, device=device,
        )  # fmt: skip
        reached = seq_lens == self._length[rows]
        return StepInputs(
            token_ids=to_device(self._tokens[token_rows, positions].astype(np.int64), device),
            positions=to_device(positions, device), attention=attention, rows=rows, counts=counts,
            starts=starts, sampled_rows=rows[reached],
            sampled_positions=to_device((ends[reached] - 1).astype(np.int64), device),
            embedded=self._embedded(plan.rows, starts.tolist(), ends.tolist(), device) if self._embeds else None,
        )  # fmt: skip

    def _embedded(
        self, rows: Sequence[int], starts: list[int], ends: list[int], device: torch.device
    ) -> Embedded | None:
        """Those of a step's tokens that come as embeddings: row i computes from `starts[i]` on, to `ends[i]` in T."""
        at, parts = [], []
        begin = 0
        for row, start, end in zip(rows, starts, ends, strict=True):
            if (embeds := self._embeds.get(row)) is not None:
                part = embeds[start : start + end - begin]
                at.append(np.arange(begin, begin + len(part)))
                parts.append(part)
            begin = end
        if not at:
            return None
        return Embedded(to_device(np.concatenate(at), device), torch.from_numpy(np.concatenate(parts)))

    def prompt_logprobs_wanted(self, inputs: StepInputs) -> list[PromptAsk]:
        """Rows of this step whose prompt log-probabilities are asked for."""
        asks: list[PromptAsk] = []
        if not self._sampling.prompt_logprobs[inputs.rows].any():
            return asks
        offset = 0
        for row, count, start in zip(inputs.rows.tolist(), inputs.counts.tolist(), inputs.starts.tolist(), strict=True):
            state = self.state(row)
            wanted = state.sampling.prompt_logprobs
            if wanted is not None and start + 1 < state.prompt_length:
                last = min(start + count + 1, state.prompt_length)
                alternatives = self._vocab_size if wanted == -1 else wanted
                asks.append(PromptAsk(row, offset, self._tokens[row, start + 1 : last], start + 1, alternatives))
            offset += count
        return asks

    def advance(self, inputs: StepInputs) -> None:
        """Note that the step's tokens are computed."""
        self._computed[inputs.rows] += inputs.counts
        if inputs.embedded is not None:
            for row in [row for row, embeds in self._embeds.items() if self._computed[row] >= len(embeds)]:
                del self._embeds[row]

    def state(self, row: int) -> RowState:
        """What the sampler knows of a row."""
        state = self._state[row]
        assert state is not None, row
        return state

    def all_plain(self, rows: Rows) -> bool:
        """Whether all of the rows want the likeliest token, with nothing but forms that changes or reports logits."""
        p = self._sampling
        return bool((p.plain[rows] & (self._length[rows] >= p.may_end[rows])).all())

    def held_to_forms(self, rows: Rows) -> list[tuple[int, RowState]]:
        """Those of the rows whose output must follow a grammar, and where they stand among them."""
        return [(i, self.state(int(rows[i]))) for i in np.flatnonzero(self._sampling.form[rows]).tolist()]

    def sample_ask(self, held: Rows) -> SampleAsk:
        """What the rows ask of the sampler."""
        return self._ask(held, self._length[held])

    def prompt_ask(self, row: int, begin: int, count: int) -> SampleAsk:
        """What a row would ask of the sampler for its prompt's tokens at `begin` and after, if it had no more yet."""
        lengths = np.arange(begin, begin + count, dtype=np.int32)
        ask = self._ask(np.full(count, row), lengths)
        if ask.penalties is not None:
            prompt = np.minimum(ask.penalties.prompt, ask.penalties.length)
            ask = replace(ask, penalties=replace(ask.penalties, prompt=prompt))
        edited = [
            (i, replace(state, prompt_length=int(lengths[i]), known=lengths[i : i + 1], grammar=None, thinking=None))
            for i, state in ask.edited
        ]
        return replace(ask, edited=edited)

    def _ask(self, held: Rows, length: Ints) -> SampleAsk:
        p = self._sampling
        draws = Draws(
            temperature=p.temperature[held], min_p=p.min_p[held], top_k=p.top_k[held], top_p=p.top_p[held],
            key=noise_keys(p.stream[held], length),
        )  # fmt: skip
        edited = np.flatnonzero(p.edited[held] | (length < p.may_end[held])).tolist()
        return SampleAsk(
            draws, self._penalties(held, length), [(i, self.state(int(held[i]))) for i in edited], p.logprobs[held]
        )

    def _penalties(self, held: Rows, length: Ints) -> Penalties | None:
        p = self._sampling
        at = np.flatnonzero(p.penalised[held])
        if not len(at):
            return None
        rows = held[at]
        return Penalties(
            at=at, tokens=self._tokens, held=rows, prompt=p.prompt_length[rows], length=length[at].astype(np.int64),
            repetition=p.repetition[rows], frequency=p.frequency[rows], presence=p.presence[rows],
        )  # fmt: skip

    def append(self, rows: Rows, token_ids: list[int]) -> None:
        """Append a sampled token to each of the rows."""
        length = self._length[rows]
        self._tokens[rows, length] = token_ids
        self._length[rows] = length + 1

    def _start(self, start: StartRow) -> None:
        row, length = start.row, len(start.token_ids)
        self._tokens[row, :length] = start.token_ids
        self._length[row] = length
        self._computed[row] = start.computed
        self._embeds.pop(row, None)
        if start.embeds is not None:
            self._embeds[row] = np.frombuffer(start.embeds, np.float32).reshape(start.prompt_length, -1)
        self._blocks[row, : len(start.block_ids)] = start.block_ids
        self._num_blocks[row] = len(start.block_ids)
        sampling = start.sampling
        ends = sampling.stop_token_ids if sampling.ignore_eos else (*self._end_tokens, *sampling.stop_token_ids)
        bias = sampling.logit_bias or {}
        self._state[row] = RowState(
            row=row, sampling=sampling, prompt_length=start.prompt_length, tokens=self._tokens[row],
            end_tokens=np.array(ends, np.int64),
            bias=(np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)),
            known=self._length[row : row + 1], grammar=self._follow(sampling),
            thinking=None if sampling.thinking is None else ThinkingLimit(sampling.thinking),
        )  # fmt: skip
        self._sampling.set(row, start)


class _SamplingArrays:
    """Sampling parameters, an entry for each row of the batch."""

    def __init__(self, rows: int, edits_all: bool) -> None:
        self._edits_all = edits_all
        self.plain = np.zeros(rows, bool)
        self.form = np.zeros(rows, bool)
        self.penalised = np.zeros(rows, bool)
        self.edited = np.zeros(rows, bool)
        self.may_end = np.zeros(rows, np.int64)  # the length from which on end tokens are allowed
        self.prompt_length = np.zeros(rows, np.int64)
        self.temperature = np.zeros(rows, np.float32)
        self.min_p = np.zeros(rows, np.float64)
        self.top_k = np.zeros(rows, np.int64)
        self.top_p = np.zeros(rows, np.float64)
        self.stream = np.zeros(rows, np.uint64)
        self.repetition = np.zeros(rows, np.float32)
        self.frequency = np.zeros(rows, np.float32)
        self.presence = np.zeros(rows, np.float32)
        self.logprobs = np.zeros(rows, np.int32)
        self.prompt_logprobs = np.zeros(rows, bool)  # whether any are asked for

    def set(self, row: int, start: StartRow) -> None:
        """Note what a request asks for."""
        p = start.sampling
        self.penalised[row] = p.repetition_penalty != 1.0 or bool(p.frequency_penalty or p.presence_penalty)
        edited = (
            self._edits_all
            or p.allowed_token_ids is not None
            or p.thinking is not None
            or bool(p.logprob_token_ids or p.bad_words_ids or p.logit_bias or p.extra_args)
        )
        self.form[row] = p.structured_outputs is not None
        self.edited[row] = edited or self.form[row]
        self.may_end[row] = start.prompt_length + p.min_tokens
        self.prompt_length[row] = start.prompt_length
        self.temperature[row] = 0.0 if p.greedy else p.temperature
        self.min_p[row], self.top_k[row], self.top_p[row] = p.min_p, p.top_k, p.top_p
        self.repetition[row] = p.repetition_penalty
        self.frequency[row], self.presence[row] = p.frequency_penalty, p.presence_penalty
        self.prompt_logprobs[row] = p.prompt_logprobs is not None
        self.logprobs[row] = NO_LOGPROBS if p.logprobs is None else p.logprobs
        assert p.greedy or p.seed is not None
        self.stream[row] = stream_key(p.seed or 0, start.choice_index)
        self.plain[row] = p.greedy and p.logprobs is None and not (self.penalised[row] or edited)
