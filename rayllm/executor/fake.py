"""An executor without a model, for tests of what stands above it: tokens follow from the context by a formula.

It keeps a KV cache of token ids and reads each context back through the blocks of its row, so a block that is
reused, shared or freed wrongly changes the tokens; or fails the step, if it belongs to layers with a window.
"""

from collections.abc import Callable
from concurrent.futures import Future
from hashlib import blake2b
from typing import Any

from rayllm.kv.layout import KVLayout
from rayllm.messages.ingress import TokenLogprobs
from rayllm.messages.structured import StructuredOutputs
from rayllm.messages.worker import StartRow, StepPlan, StepResult


def next_token(context: list[int], vocab_size: int) -> int:
    """The token that the fake model gives after `context`."""
    digest = blake2b(repr(context).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


class _Row:
    def __init__(self, start: StartRow) -> None:
        self.tokens = list(start.token_ids)
        self.prompt_length = start.prompt_length
        self.computed = start.computed
        self.blocks = list(start.block_ids)
        self.sampling = start.sampling


class FakeExecutor:
    """Carries out steps at once, on the caller's thread."""

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        model: Callable[[list[int], int], int] = next_token,
        layout: KVLayout | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._model = model
        self._layout = layout or KVLayout()
        self._rows: dict[int, _Row] = {}
        self._cache: dict[tuple[int, int], tuple[int, int]] = {}  # of (group, token)
        self.steps = 0
        self.tokens_computed = 0
        self.largest_step = 0
        self.fail_at: int | None = None
        """The step that raises, counted from 0."""
        self.grammars: list[Future[Any]] = []
        """Those that were asked for, for a test to end."""
        self.step_times = (0.0, 0.0)
        """What each step says it took."""

    def kv_bytes_per_block(self) -> int:
        """One byte a token."""
        return self._block_size

    def available_kv_bytes(self) -> int:
        """Room for 1,024 tokens."""
        return 1024

    def allocate(self, num_blocks: int) -> None:
        """Nothing to allocate."""

    def logits_processor_names(self) -> frozenset[str]:
        """None are loaded."""
        return frozenset()

    def prepare_grammar(self, asked: StructuredOutputs) -> "Future[Any]":
        """Not done until `grammars` is told so. The fake model does not heed grammars."""
        self.grammars.append(Future())
        return self.grammars[-1]

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """There are no workers."""
        return []

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """Carry out a step."""
        future: Future[StepResult] = Future()
        try:
            if self.steps == self.fail_at:
                raise RuntimeError("the worker failed, as the test asked")
            future.set_result(self._execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def profile(self, begin: bool) -> None:
        """Nothing to profile."""

    def shutdown(self) -> None:
        """Nothing to end."""

    def _execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        self.tokens_computed += sum(plan.counts)
        self.largest_step = max(self.largest_step, sum(plan.counts))
        for start in plan.start:
            self._rows[start.row] = _Row(start)
        for index, blocks in plan.grown:
            self._rows[index].blocks += blocks
        for index, count in zip(plan.rows, plan.counts, strict=True):
            row = self._rows[index]
            for position in range(row.computed, row.computed + count):
                for group in range(self._layout.width):
                    self._cache[self._place(row, position, group)] = group, row.tokens[position]
        result = StepResult([], [], {}, {}, times=self.step_times)
        for index, count in zip(plan.rows, plan.counts, strict=True):
            self._advance(index, count, result)
        return result

    def _advance(self, index: int, count: int, result: StepResult) -> None:
        row = self._rows[index]
        begin = row.computed
        row.computed += count
        for group in range(self._layout.width - self._layout.sliding, self._layout.width):
            for position in range(max(0, begin - self._layout.window + 1), row.computed):
                held = self._cache[self._place(row, position, group)]
                if held != (group, row.tokens[position]):
                    raise RuntimeError(f"group {group} of row {index} holds {held} at {position}")
        if row.sampling.prompt_logprobs is not None and begin + 1 < row.prompt_length:
            ids = row.tokens[begin + 1 : min(row.computed + 1, row.prompt_length)]
            result.prompt_logprobs[index] = [TokenLogprobs(token, -1.0, 1) for token in ids]
        if row.computed == len(row.tokens):
            context = self._context(row)
            token = self._model(context, self._vocab_size)
            row.tokens.append(token)
            result.rows.append(index)
            result.token_ids.append(token)
            if row.sampling.logprobs is not None:
                result.logprobs[index] = TokenLogprobs(token, -1.0, 1)

    def _context(self, row: _Row) -> list[int]:
        if self._layout.sliding == self._layout.width:
            return row.tokens[: row.computed]
        return [self._cache[self._place(row, position, 0)][1] for position in range(row.computed)]

    def _place(self, row: _Row, position: int, group: int) -> tuple[int, int]:
        stretch, offset = divmod(position, self._block_size)
        return row.blocks[stretch * self._layout.width + group], offset
