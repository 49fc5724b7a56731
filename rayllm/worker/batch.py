"""The state of the batch, a row for each running request, and the tensors that a step makes of it.

Everything a step needs of all rows lies in arrays, so that a step of many rows costs a fixed number of numpy calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rayllm.messages.sampling import SamplingParams
from rayllm.messages.worker import StartRow, StepPlan
from rayllm_kernels import AttentionBatch

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class RowState:
    """What the sampler knows of a row."""

    row: int
    sampling: SamplingParams
    choice_index: int
    prompt_length: int
    tokens: Ints
    """The whole row; `tokens[:length]` is valid."""
    end_tokens: tuple[int, ...]
    """Tokens that may not come before `min_tokens`."""
    plain: bool = False
    """The likeliest token is wanted, with nothing that changes or reports logits."""
    length: int = 0
    """Prompt and output known so far; the position of the token to sample."""
    output_counts: dict[int, int] = field(default_factory=dict)
    """How often each token stands in the output; kept only where a penalty needs it."""
    distinct: npt.NDArray[np.int64] | None = None
    """Prompt tokens without repeats; kept only where the repetition penalty needs it."""

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return self.length - self.prompt_length


@dataclass(frozen=True, slots=True)
class PromptAsk:
    """A row that wants log-probabilities of the prompt tokens after those in this step."""

    row: int
    offset: int
    """Where the row's tokens begin in the step."""
    next_tokens: Ints
    alternatives: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step as the model takes it: T tokens of B rows."""

    token_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64
    attention: AttentionBatch
    rows: Ints  # (B,)
    counts: Ints  # (B,)
    starts: Ints  # (B,) tokens computed before this step
    sampled_rows: list[int]
    sampled_positions: torch.Tensor  # (R,) int64, indices into T


class Batch:
    """Owns the rows."""

    def __init__(
        self, *, rows: int, max_tokens: int, block_size: int, vocab_size: int, end_tokens: Sequence[int]
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._end_tokens = tuple(end_tokens)
        # One more than the context holds: a step in flight may sample past the end of a request.
        self._tokens = np.zeros((rows, max_tokens + 1), np.int32)
        self._length = np.zeros(rows, np.int32)
        self._computed = np.zeros(rows, np.int32)
        self._blocks = np.zeros((rows, -(-(max_tokens + 1) // block_size)), np.int32)
        self._num_blocks = np.zeros(rows, np.int32)
        self._state: list[RowState | None] = [None] * rows

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
        rows = np.array(plan.rows, np.int32)
        counts = np.array(plan.counts, np.int32)
        starts = self._computed[rows]
        ends = np.cumsum(counts)
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + starts[row_of_token]
        token_rows = rows[row_of_token]
        seq_lens = starts + counts
        width = -(-int(seq_lens.max()) // self._block_size)
        blocks = self._blocks[token_rows, positions // self._block_size].astype(np.int64)
        attention = AttentionBatch.from_numpy(
            query_start=np.concatenate(([0], ends)).astype(np.int32), seq_lens=seq_lens,
            block_table=self._blocks[rows, :width],
            slot_mapping=blocks * self._block_size + positions % self._block_size, device=device,
        )  # fmt: skip
        reached = seq_lens == self._length[rows]
        return StepInputs(
            token_ids=torch.from_numpy(self._tokens[token_rows, positions].astype(np.int64)).to(device),
            positions=torch.from_numpy(positions.astype(np.int64)).to(device),
            attention=attention, rows=rows, counts=counts, starts=starts, sampled_rows=rows[reached].tolist(),
            sampled_positions=torch.from_numpy((ends[reached] - 1).astype(np.int64)).to(device),
        )  # fmt: skip

    def prompt_logprobs_wanted(self, inputs: StepInputs) -> list[PromptAsk]:
        """Rows of this step whose prompt log-probabilities are asked for."""
        asks = []
        offset = 0
        for row, count, start in zip(inputs.rows.tolist(), inputs.counts.tolist(), inputs.starts.tolist(), strict=True):
            state = self.state(row)
            wanted = state.sampling.prompt_logprobs
            if wanted is not None and start + 1 < state.prompt_length:
                last = min(start + count + 1, state.prompt_length)
                alternatives = self._vocab_size if wanted == -1 else wanted
                asks.append(PromptAsk(row, offset, self._tokens[row, start + 1 : last], alternatives))
            offset += count
        return asks

    def advance(self, plan: StepPlan) -> None:
        """Note that the step's tokens are computed."""
        self._computed[np.array(plan.rows, np.int32)] += np.array(plan.counts, np.int32)

    def state(self, row: int) -> RowState:
        """What the sampler knows of a row."""
        state = self._state[row]
        assert state is not None, row
        return state

    def append(self, rows: list[int], token_ids: list[int]) -> None:
        """Append a sampled token to each of the rows."""
        for row, token in zip(rows, token_ids, strict=True):
            state = self.state(row)
            self._tokens[row, state.length] = token
            state.length += 1
            self._length[row] = state.length
            if _penalised(state.sampling):
                state.output_counts[token] = state.output_counts.get(token, 0) + 1

    def _start(self, start: StartRow) -> None:
        row, length = start.row, len(start.token_ids)
        self._tokens[row, :length] = start.token_ids
        self._length[row] = length
        self._computed[row] = start.computed
        self._blocks[row, : len(start.block_ids)] = start.block_ids
        self._num_blocks[row] = len(start.block_ids)
        sampling = start.sampling
        ends = sampling.stop_token_ids if sampling.ignore_eos else (*self._end_tokens, *sampling.stop_token_ids)
        state = RowState(
            row=row, sampling=sampling, choice_index=start.choice_index, prompt_length=start.prompt_length,
            tokens=self._tokens[row], end_tokens=ends, length=length, plain=_plain(sampling),
        )  # fmt: skip
        if _penalised(sampling):
            tokens, counts = np.unique(self._tokens[row, start.prompt_length : length], return_counts=True)
            state.output_counts = dict(zip(tokens.tolist(), counts.tolist(), strict=True))
            state.distinct = np.unique(self._tokens[row, : start.prompt_length]).astype(np.int64)
        self._state[row] = state


def _penalised(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or bool(sampling.frequency_penalty or sampling.presence_penalty)


def _plain(sampling: SamplingParams) -> bool:
    changed = sampling.allowed_token_ids is not None or sampling.bad_words_ids or sampling.min_tokens
    return (
        not (not sampling.greedy or changed or sampling.logit_bias or sampling.extra_args or _penalised(sampling))
        and sampling.logprobs is None
    )
