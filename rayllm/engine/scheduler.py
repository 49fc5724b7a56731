"""Which tokens the next step computes. Plain data in, plain data out: no tensor, clock, thread or actor.

There is no prefill or decode phase: each request has tokens wanted and tokens computed, and a step spends one budget
closing the gaps, oldest request first. A long prompt is computed in chunks, a prefix hit only moves the start, and
a preempted request simply has everything to compute again.

The next step may be planned before the last one has come back: the tokens it samples are then in flight, and the
workers, which append them to the batch themselves, know them in time.
"""

import heapq
from bisect import insort
from dataclasses import dataclass, field
from itertools import count

import msgspec

from rayllm.engine.request import Request, State
from rayllm.kv.blocks import BlockPool
from rayllm.kv.prefix import extend_hashes
from rayllm.messages.ingress import FinishReason, RequestOutput
from rayllm.messages.worker import StartRow, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    prefix_caching: bool = True
    by_priority: bool = False


@dataclass(slots=True)
class PlannedStep:
    """A step that was sent: the message, and the requests behind its rows."""

    plan: StepPlan
    requests: list[Request]
    sampling: list[Request]
    """Those that get a token, in the order of the plan."""


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(slots=True)
class _Draft:
    """A step while it is planned."""

    budget: int
    start: list[StartRow] = field(default_factory=list)
    grown: list[tuple[int, list[int]]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    sampling: list[Request] = field(default_factory=list)


class Scheduler:
    """Owns the queue, the running set and the requests' blocks."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.counters = Counters()
        self.running: list[Request] = []  # sorted: the last one is preempted first
        self._queue: list[Request] = []  # a heap; requests that finished while waiting are skipped when met
        self._waiting = 0
        self._tokens_waiting = 0
        self._rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._sequence = count()
        self._step = count()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first or next turn."""
        return self._waiting

    @property
    def tokens_waiting(self) -> int:
        """Tokens of waiting requests."""
        return self._tokens_waiting

    def add(self, request: Request) -> None:
        """Queue a new request."""
        priority = request.add.priority if self.limits.by_priority else 0
        request.sort_key = (priority, request.add.arrival_time, next(self._sequence))
        self._enqueue(request)

    def finish(self, request: Request) -> None:
        """Take a request out, in whatever state, and free what it holds. Steps in flight for it come to nothing."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._publish(request)
            self._release(request)
        else:
            self._waiting -= 1
            self._tokens_waiting -= len(request.tokens)
        request.move_to(State.FINISHED)
        if len(self._queue) > 2 * self._waiting + 64:
            self._queue = [r for r in self._queue if r.state is not State.FINISHED]
            heapq.heapify(self._queue)

    def plan(self) -> PlannedStep | None:
        """The next step, or None if there is nothing to compute now."""
        draft = _Draft(self.limits.max_num_batched_tokens)
        preempted = self._continue_running(draft)
        if not preempted:
            self._admit_waiting(draft)
        if not draft.rows:
            return None
        plan = StepPlan(next(self._step), draft.start, draft.grown, draft.rows, draft.counts)
        return PlannedStep(plan, draft.requests, draft.sampling)

    def commit(self, step: PlannedStep, result: StepResult) -> list[tuple[Request, RequestOutput]]:
        """Take in what a step produced: append tokens, end requests that are done, free their blocks.

        Requests that finished since the step was planned are passed over.
        """
        assert len(result.token_ids) == len(step.sampling), (result.rows, step.plan)
        for row, entries in result.prompt_logprobs.items():
            request = step.requests[step.plan.rows.index(row)]
            # One that was preempted since, in the middle of its prompt, begins again.
            if (request.row == row or request.in_flight) and request.prompt_logprobs is not None:
                request.prompt_logprobs.extend(entries)
        outputs = []
        for request, row, token in zip(step.sampling, result.rows, result.token_ids, strict=True):
            request.in_flight -= 1
            if request.state is not State.FINISHED:
                outputs.append((request, self._accept(request, row, token, result)))
        return outputs

    # -- planning

    def _continue_running(self, draft: _Draft) -> bool:
        """Give running requests their tokens. True if one had to be preempted for lack of blocks."""
        preempted = False
        index = 0
        while index < len(self.running) and draft.budget > 0:
            request = self.running[index]
            tokens = min(request.unplanned, draft.budget)
            if tokens == 0:
                index += 1
                continue
            blocks: list[int] | None = []
            need = self._blocks_for(request.computed + tokens) - len(request.blocks)
            if need > 0:
                while (blocks := self.pool.take(need)) is None:
                    victim = self.running[-1]
                    self._preempt(victim)
                    preempted = True
                    if victim is request:
                        return True
            if blocks:
                request.blocks += blocks
                draft.grown.append((request.row, blocks))
            self._schedule(draft, request, tokens)
            index += 1
        return preempted

    def _admit_waiting(self, draft: _Draft) -> None:
        """Start waiting requests, in order, while there is budget, a row and room for all their tokens."""
        while self._queue and draft.budget > 0 and self._rows:
            request = self._queue[0]
            if request.state is State.FINISHED:
                heapq.heappop(self._queue)
                continue
            if request.in_flight:
                return  # preempted a moment ago: the token under way must come in first
            found = self._find_prefix(request)
            held = sum(self.pool.is_held(block) for block in found)
            # A block to spare for each running request: else the newcomer would be the next one preempted.
            if self._blocks_for(len(request.tokens)) - held + len(self.running) > self.pool.free:
                return
            heapq.heappop(self._queue)
            self._start(draft, request, found)

    def _start(self, draft: _Draft, request: Request, found: list[int]) -> None:
        self.pool.share(found)
        request.computed = len(found) * self.limits.block_size
        request.published = len(found)
        if request.cached_tokens is None:
            request.cached_tokens = min(request.computed, request.num_prompt)
            if self._reads_cache(request):
                self.counters.prefix_queries += len(request.tokens)
                self.counters.prefix_hits += request.computed
        tokens = min(len(request.tokens) - request.computed, draft.budget)
        fresh = self.pool.take(self._blocks_for(request.computed + tokens) - len(found))
        assert fresh is not None
        request.blocks = [*found, *fresh]
        request.row = self._rows.pop()
        self._waiting -= 1
        self._tokens_waiting -= len(request.tokens)
        request.move_to(State.RUNNING)
        insort(self.running, request)
        sampling = request.add.sampling
        if sampling.prompt_logprobs is not None and request.prompt_logprobs is None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # they were sent before a preemption
        draft.start.append(
            StartRow(
                row=request.row, token_ids=list(request.tokens), prompt_length=request.num_prompt,
                computed=request.computed, block_ids=list(request.blocks), sampling=sampling,
                choice_index=request.add.choice_index,
            )
        )  # fmt: skip
        self._schedule(draft, request, tokens)

    def _schedule(self, draft: _Draft, request: Request, tokens: int) -> None:
        draft.budget -= tokens
        draft.rows.append(request.row)
        draft.counts.append(tokens)
        draft.requests.append(request)
        request.computed += tokens
        if request.computed == len(request.tokens) + request.in_flight:
            request.in_flight += 1
            draft.sampling.append(request)
        self._publish(request)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.computed = request.published = 0
        if request.prompt_logprobs is not None and not request.in_flight:
            request.prompt_logprobs = []
        request.move_to(State.PREEMPTED)
        self._enqueue(request)
        self.counters.preemptions += 1

    # -- blocks

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _reads_cache(self, request: Request) -> bool:
        # Prompt logprobs need the hidden state of every prompt token, which the cache does not hold.
        return self.limits.prefix_caching and request.prompt_logprobs is None

    def _find_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the longest known prefix; at least one token is left to compute."""
        if not self._reads_cache(request):
            return []
        size = self.limits.block_size
        usable = (len(request.tokens) - 1) // size
        extend_hashes(request.hashes, request.root, request.tokens, size, usable)
        found: list[int] = []
        for block_hash in request.hashes[:usable]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _publish(self, request: Request) -> None:
        """Make full blocks findable whose tokens are known.

        They may be computed by a step that is only planned: whoever finds them is computed by that step, where
        each layer writes before it reads, or by a later one.
        """
        if not self.limits.prefix_caching:
            return
        full = min(request.computed, len(request.tokens)) // self.limits.block_size
        if full > request.published:
            extend_hashes(request.hashes, request.root, request.tokens, self.limits.block_size, full)
            for index in range(request.published, full):
                self.pool.publish(request.blocks[index], request.hashes[index])
            request.published = full

    def _release(self, request: Request) -> None:
        self.pool.give_back(request.blocks)
        request.blocks = []
        self._rows.append(request.row)
        request.row = -1

    def _enqueue(self, request: Request) -> None:
        heapq.heappush(self._queue, request)
        self._waiting += 1
        self._tokens_waiting += len(request.tokens)

    # -- results

    def _accept(self, request: Request, row: int, token: int, result: StepResult) -> RequestOutput:
        """Append a sampled token and say what to send for it."""
        first = request.num_output == len(request.add.output_token_ids)
        reason: FinishReason | None = None
        stop_token = None
        token_ids = [token]
        error = result.failed.get(row)
        if error is not None:
            reason, token_ids = "error", []
        elif len(request.tokens) >= request.limit:
            reason, token_ids = "length", []  # no output was wanted: only the prompt's log-probabilities
        else:
            if request.state is State.PREEMPTED:
                self._tokens_waiting += 1
            request.tokens.append(token)
            if token in request.stop_ids and request.num_output >= request.add.sampling.min_tokens:
                reason, stop_token = "stop", token
            elif len(request.tokens) >= request.limit:
                reason = "length"
        prompt_logprobs = None
        if request.prompt_logprobs is not None:
            prompt_logprobs = [None, *request.prompt_logprobs]
            request.prompt_logprobs = None
        if reason is not None:
            self.finish(request)
        return RequestOutput(
            request_id=request.add.request_id, token_ids=token_ids, finish_reason=reason, stop_token_id=stop_token,
            logprobs=[result.logprobs[row]] if token_ids and row in result.logprobs else None,
            prompt_logprobs=prompt_logprobs, cached_tokens=request.cached_tokens if first else None, error=error,
        )  # fmt: skip
