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
from rayllm.kv.layout import KVLayout
from rayllm.kv.prefix import BlockHash, block_hash, extend_hashes
from rayllm.messages.ingress import FinishReason, RequestOutput
from rayllm.messages.worker import StartRow, StepPlan, StepResult

LOOK_AHEAD = 64
"""Long prompts that a step looks past for a shorter one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    prefix_caching: bool = True
    by_priority: bool = False
    chunked_prefill: bool = True
    """Whether a prompt may be computed in several steps. If not, `max_num_batched_tokens` must hold every request."""
    max_partial_prefills: int = 1
    """Prompts that may be under way, computed in part, at once. They share a step's budget alike."""
    max_long_partial_prefills: int = 1
    """How many of them may be longer than `long_prefill_tokens`; shorter ones then overtake."""
    long_prefill_tokens: int = 0
    reserve_whole: bool = True
    """Whether a request starts only when all its tokens fit into the cache, not just its first chunk."""
    layout: KVLayout = field(default_factory=KVLayout)
    """Which groups of layers a request takes blocks for."""
    stages: int = 1
    """Of the pipeline. With several, a request's next token is planned when the last is known, and each step takes a
    share of those that run, so that every stage has a step to compute."""


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
    prefills: int = 1
    """Prompts that may yet take a share of the budget."""
    partial: int = 0
    """Prompts computed in part after this step."""
    long_partial: int = 0
    start: list[StartRow] = field(default_factory=list)
    grown: list[tuple[int, list[int]]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    sampling: list[Request] = field(default_factory=list)


class Scheduler:
    """Owns the queue, the running set and the requests' blocks.

    A subclass may be given to --scheduler-cls. The engine calls `add` and `finish` between steps, `plan` for the next
    step, and `commit` with the results of each, in order. `order` decides who goes first; every order keeps tokens as
    they are and blocks accounted for, and starves nobody as long as arrivals move to the end of it.
    """

    def __init__(self, limits: Limits, pool: BlockPool, hashed: BlockHash = block_hash) -> None:
        """`hashed` names the content of full blocks."""
        self.limits = limits
        self.pool = pool
        self._hash = hashed
        self._layout = limits.layout
        self._width, self._full = limits.layout.width, limits.layout.width - limits.layout.sliding
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

    def order(self, request: Request) -> tuple[float, ...]:
        """Where a new request stands among those that wait or run: the smallest starts first and is preempted last."""
        priority = request.add.priority if self.limits.by_priority else 0
        return priority, request.add.arrival_time

    def add(self, request: Request) -> None:
        """Queue a new request."""
        request.sort_key = (*self.order(request), next(self._sequence))
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
        draft = _Draft(self.limits.max_num_batched_tokens, self._expected_prefills())
        preempted = self._continue_running(draft)
        if not preempted:
            self._admit_waiting(draft)
            self._spend_rest(draft)
        if not draft.rows:
            return None
        plan = StepPlan(next(self._step), draft.start, draft.grown, draft.rows, draft.counts)
        return PlannedStep(plan, draft.requests, draft.sampling)

    def preempt_all(self) -> None:
        """Have every running request give up its blocks and compute all its tokens again."""
        for request in list(reversed(self.running)):
            self._preempt(request)

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
        preempted, slides = False, self._layout.sliding > 0
        index = 0
        most = -(-len(self.running) // self.limits.stages)
        while index < len(self.running) and draft.budget > 0 and len(draft.rows) < most:
            request = self.running[index]
            waits = self.limits.stages > 1 and request.in_flight
            tokens = 0 if waits else self._share(draft, request.unplanned)
            if tokens == 0:
                index += 1
                continue
            if slides:
                self._leave_window(request)
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
        """Start waiting requests, in order, while there is budget, a row and room in the cache.

        Only a long prompt that must wait for another long one lets those behind it go ahead.
        """
        overtaken: list[Request] = []
        while self._queue and draft.budget > 0 and self._rows:
            request = self._queue[0]
            if request.state is State.FINISHED:
                heapq.heappop(self._queue)
                continue
            if request.in_flight:
                break  # preempted a moment ago: the token under way must come in first
            if self._must_let_pass(draft, request):
                overtaken.append(heapq.heappop(self._queue))
                if len(overtaken) == LOOK_AHEAD:
                    break
                continue
            found, passed = self._find_prefix(request)
            left = len(request.tokens) - len(found) // self._width * self.limits.block_size
            tokens = self._first_chunk(draft, request, left)
            if tokens == 0:
                break
            held = sum(self.pool.is_held(block) for block in self._kept(found, passed))
            needed = len(request.tokens) - (0 if self.limits.reserve_whole else left - tokens)
            # Blocks to spare for each running request: else the newcomer would be the next one preempted.
            if self._most_blocks(needed) - held + len(self.running) * self._width > self.pool.free:
                break
            heapq.heappop(self._queue)
            draft.prefills -= 1
            self._start(draft, request, found, passed, tokens)
        for request in overtaken:
            heapq.heappush(self._queue, request)

    def _first_chunk(self, draft: _Draft, request: Request, left: int) -> int:
        """Tokens that a new request computes first; 0 if it may not start now."""
        limits = self.limits
        if not limits.chunked_prefill:
            return left if left <= draft.budget else 0
        tokens = min(left, -(-draft.budget // max(1, draft.prefills)))
        return tokens if tokens == left or draft.partial < limits.max_partial_prefills else 0

    def _must_let_pass(self, draft: _Draft, request: Request) -> bool:
        """Whether it is a long prompt that waits for another long one."""
        return draft.long_partial >= self.limits.max_long_partial_prefills and self._is_long(request)

    def _start(self, draft: _Draft, request: Request, found: list[int], passed: int, tokens: int) -> None:
        self.pool.share(self._kept(found, passed))
        request.published = len(found) // self._width
        request.computed = request.published * self.limits.block_size
        request.passed = passed
        if request.cached_tokens is None:
            request.cached_tokens = min(request.computed, request.num_prompt)
            if self._reads_cache(request):
                self.counters.prefix_queries += len(request.tokens)
                self.counters.prefix_hits += request.computed
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
                embeds=request.embeds if request.computed < request.num_prompt else None,
            )
        )  # fmt: skip
        self._schedule(draft, request, tokens)

    def _schedule(self, draft: _Draft, request: Request, tokens: int) -> None:
        draft.budget -= tokens
        draft.rows.append(request.row)
        draft.counts.append(tokens)
        draft.requests.append(request)
        self._advance(draft, request, tokens)
        if request.computed < len(request.tokens):
            draft.partial += 1
            draft.long_partial += self._is_long(request)

    def _advance(self, draft: _Draft, request: Request, tokens: int) -> None:
        request.computed += tokens
        if request.computed == len(request.tokens) + request.in_flight:
            request.in_flight += 1
            draft.sampling.append(request)
        self._publish(request)

    # -- prompts in pieces

    def _is_long(self, request: Request) -> bool:
        return request.num_prompt > self.limits.long_prefill_tokens

    def _expected_prefills(self) -> int:
        """Prompts among which the next step's budget is shared: those under way, and those that may join them."""
        most = self.limits.max_partial_prefills
        if most == 1:
            return 1
        return min(most, sum(request.unplanned > 1 for request in self.running) + self._waiting)

    def _share(self, draft: _Draft, wanted: int) -> int:
        """How many of the tokens that a running request wants it gets."""
        if wanted <= 1:
            return wanted
        tokens = min(wanted, -(-draft.budget // max(1, draft.prefills)))
        draft.prefills -= 1
        return tokens

    def _spend_rest(self, draft: _Draft) -> None:
        """Give what is left, because fewer prompts could start than were expected, to those under way."""
        if not draft.partial or not draft.budget:
            return
        for index, request in enumerate(draft.requests):
            tokens = min(len(request.tokens) - request.computed, draft.budget)
            if tokens <= 0:
                continue
            blocks = self.pool.take(self._blocks_for(request.computed + tokens) - len(request.blocks))
            if blocks is None:
                break
            if blocks:
                request.blocks += blocks
                draft.grown.append((request.row, blocks))
            draft.budget -= tokens
            draft.counts[index] += tokens
            self._advance(draft, request, tokens)
        reached = set(draft.sampling)
        draft.sampling = [request for request in draft.requests if request in reached]  # the order of the rows

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
        return -(-tokens // self.limits.block_size) * self._width

    def _most_blocks(self, tokens: int) -> int:
        """Blocks that a request may hold at once on its way to so many tokens."""
        return self._layout.most_blocks(tokens, self.limits.max_num_batched_tokens, self.limits.block_size)

    def _kept(self, blocks: list[int], passed: int) -> list[int]:
        """Those of a request's blocks that it holds: without what lies before the windows."""
        if not passed:
            return blocks
        return [b for i, b in enumerate(blocks) if i % self._width < self._full or i // self._width >= passed]

    def _leave_window(self, request: Request) -> None:
        """Give back blocks that no token from now on sees. Steps that were sent read them before they are written."""
        first = self._layout.first_seen(request.computed, self.limits.block_size)
        if first > request.passed:
            begin, end = request.passed * self._width, first * self._width
            self.pool.give_back([request.blocks[i] for i in range(begin, end) if i % self._width >= self._full])
            request.passed = first

    def _reads_cache(self, request: Request) -> bool:
        # Prompt logprobs need the hidden state of every prompt token, which the cache does not hold.
        return self.limits.prefix_caching and request.prompt_logprobs is None

    def _find_prefix(self, request: Request) -> tuple[list[int], int]:
        """Blocks that hold the longest known prefix, and how many of its stretches lie before the windows.

        At least one token is left to compute.
        """
        if not self._reads_cache(request):
            return [], 0
        size = self.limits.block_size
        usable = (len(request.tokens) - 1) // size
        extend_hashes(request.hashes, request.root, request.tokens, size, usable, self._hash)
        if self._layout.sliding:
            return self._find_in_groups(request.hashes[:usable])
        found: list[int] = []
        for name in request.hashes[:usable]:
            block = self.pool.find(name)
            if block is None:
                break
            found.append(block)
        return found, 0

    def _find_in_groups(self, names: list[bytes]) -> tuple[list[int], int]:
        """As `_find_prefix`: layers with a window need the last blocks of a prefix only."""
        known: list[list[int | None]] = []
        for name in names:
            blocks = [self.pool.find(part) for part in self._names(name)]
            if None in blocks[: self._full]:
                break
            known.append(blocks)
        size = self.limits.block_size
        end, index = len(known), len(known) - 1
        while index >= self._layout.first_seen(end * size, size):
            if None in known[index][self._full :]:
                end = index
            index -= 1
        return [block or 0 for blocks in known[:end] for block in blocks], self._layout.first_seen(end * size, size)

    def _names(self, name: bytes) -> list[bytes]:
        """Under which the blocks of each group are known that hold the content of this name."""
        return [name] if self._width == 1 else [name + bytes((group,)) for group in range(self._width)]

    def _publish(self, request: Request) -> None:
        """Make full blocks findable whose tokens are known.

        They may be computed by a step that is only planned: whoever finds them is computed by that step, where
        each layer writes before it reads, or by a later one.
        """
        if not self.limits.prefix_caching:
            return
        full = min(request.computed, len(request.tokens)) // self.limits.block_size
        if full > request.published:
            extend_hashes(request.hashes, request.root, request.tokens, self.limits.block_size, full, self._hash)
            for index in range(request.published, full):
                for group, name in enumerate(self._names(request.hashes[index])):
                    if group < self._full or index >= request.passed:
                        self.pool.publish(request.blocks[index * self._width + group], name)
            request.published = full

    def _release(self, request: Request) -> None:
        self.pool.give_back(self._kept(request.blocks, request.passed))
        request.blocks, request.passed = [], 0
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
