"""What an engine sends its workers each step, and what comes back.

Workers hold the state of the batch, a row for each running request; a message carries only what changed.
"""

import msgspec

from rayllm.messages.ingress import TokenLogprobs
from rayllm.messages.sampling import SamplingParams


class EmbeddedRows(msgspec.Struct, frozen=True, array_like=True):
    """What stands in place of tokens of a prompt."""

    at: int
    """The first of these tokens."""
    count: int
    data: bytes
    """Rows of float32, one for each token."""


class StartRow(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a row: a new one, or one that goes on after a preemption."""

    row: int
    token_ids: list[int]
    """Prompt and output so far."""
    prompt_length: int
    computed: int
    """Leading tokens whose KV entries stand in the blocks already (prefix hits)."""
    block_ids: list[int]
    """One for each group of layers in turn, for each stretch of tokens; any where no layer of the group will look."""
    sampling: SamplingParams
    choice_index: int
    embeds: tuple[EmbeddedRows, ...] = ()
    """In order; none if all are computed already."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step: run `counts[i]` more tokens of row `rows[i]`, for each i.

    A row whose tokens are then all computed gets one more token sampled, which the worker appends itself.
    """

    step: int
    start: list[StartRow]
    grown: list[tuple[int, list[int]]]
    """(row, new block ids) of rows that need more blocks, in turn as in `StartRow`."""
    rows: list[int]
    counts: list[int]


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step sampled: row by row, in the order of the plan, for rows that reached their end."""

    rows: list[int]
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    """By row, where asked for."""
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    """By row: for the prompt positions after those computed in this step, in order (position 0 never)."""
    failed: dict[int, str] = {}
    """Rows that cannot go on, such as by a fault in a logits processor, and why."""
    times: tuple[float, float] = (0.0, 0.0)
    """Seconds that the model took, and the whole step."""
    cascade: bool = False
    """Whether attention over a shared prefix was computed once for several rows."""
