"""The engine: one model, one thread, one loop. It knows token ids, no text, and neither Ray nor HTTP.

The loop takes new requests, plans a step, sends it to the executor and takes in the step before it, so that
planning and delivery happen while the workers compute. It sleeps, without a timer, while there is nothing to do.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from rayllm.config.engine import EngineConfig
from rayllm.engine.admission import Admission
from rayllm.engine.commands import Commands
from rayllm.engine.inbox import Aborted, Admitted, Inbox
from rayllm.engine.interval import StreamInterval
from rayllm.engine.iterations import IterationLog
from rayllm.engine.metrics import EngineMetrics
from rayllm.engine.pause import Paused
from rayllm.engine.request import Request, State
from rayllm.engine.residency import Residency
from rayllm.engine.scheduler import Limits, PlannedStep, Scheduler
from rayllm.engine.work import Work
from rayllm.errors import ConfigError
from rayllm.executor.base import Executor, build_executor
from rayllm.kv.blocks import BlockPool
from rayllm.kv.prefix import hash_named
from rayllm.messages.engine import Add, Command
from rayllm.messages.ingress import EngineStats, Load, RequestOutput, RequestTimes, merge
from rayllm.messages.worker import StepResult
from rayllm.plugins import load_class

log = logging.getLogger(__name__)

Outputs = dict[int, list[RequestOutput]]
"""Outputs of one step by client number."""
Deliver = Callable[[Outputs, Load], None]

REASONS = ("abort", "stop")


class Engine:
    """Serves requests of numbered clients. All public methods may be called from any thread."""

    def __init__(self, config: EngineConfig, executor: Executor, pool: BlockPool) -> None:
        """Use `build`, which makes the parts; this only puts them together."""
        self.config = config
        self._executor = executor
        self._pool = pool
        self._scheduler = build_scheduler(config, pool)
        self._admission = Admission(config, executor.logits_processor_names())
        self._metrics = EngineMetrics()
        if config.kv_metrics_sample:
            residency = Residency(config.kv_metrics_sample)
            self._metrics.histograms |= residency.histograms
            pool.watch(residency)
        self._work = Work(config) if config.estimate_work else None
        self._iterations = IterationLog() if config.log_iterations else None
        self._interval = StreamInterval(config.stream_interval)
        self._requests: dict[tuple[int, int], Request] = {}
        self._sent: deque[tuple[PlannedStep, Future[StepResult]]] = deque()
        self._depth = max(2 if config.async_scheduling else 1, config.parallel.stages)
        self._inbox = Inbox(config.max_num_seqs + config.max_waiting)
        self._pause = Paused()
        self._commands = Commands(
            self._inbox, self._pause, self._scheduler, pool, executor, self._abort, config.profiler is not None
        )
        self._step_began = 0.0
        self._spent = (0.0, 0.0)
        self._load = Load()
        self._deliver: Deliver = lambda outputs, load: None
        self._thread: threading.Thread | None = None

    @classmethod
    def build(cls, config: EngineConfig) -> "Engine":
        """Load the model, allocate the KV cache and put an engine together. Takes seconds.

        Raises:
            ModelError: the model's files cannot be used.
            ConfigError: the KV cache cannot hold one request of `max_model_len` tokens, or does not fit into memory; a
                class or package is missing.
        """
        # What cannot be had is refused before the model is loaded.
        scheduler_class(config.scheduler_cls)
        hash_named(config.prefix_hash)
        executor = build_executor(config)
        try:
            blocks = count_blocks(config, executor)
            _allocate(executor, blocks, config)
        except BaseException:
            executor.shutdown()
            raise
        layout, sizes = config.kv_layout, (config.max_model_len, config.max_num_batched_tokens, config.block_size)
        log.info(
            "KV cache: %d blocks of %d tokens in %d groups of layers, %d usable tokens",
            blocks, config.block_size, layout.width, layout.usable_tokens(blocks, *sizes),
        )  # fmt: skip
        return cls(config, executor, BlockPool(blocks))

    def start(self, deliver: Deliver) -> None:
        """Start the loop. `deliver` is called from its thread, after each step that has outputs; it must not block."""
        assert self._thread is None
        self._deliver = deliver
        self._thread = threading.Thread(target=self._run, name="rllm-engine", daemon=True)
        self._thread.start()

    def add(self, client: int, add: Add) -> "Future[None] | None":
        """Admit a request; its outputs go to `deliver` under the client's number.

        None when that is done. One whose output must follow a grammar is admitted when that is compiled: the future
        is then done, before there are outputs, or it raises as this does. An abort makes it raise `RequestError`.

        Raises:
            RequestError: it can never be served as it is.
            Overloaded: too many requests wait.
            EngineDead: the engine serves no more.
        """
        self._admission.check(add)
        embeds = self._admission.read_embeds(add)
        admitted = Admitted(client, msgspec.structs.replace(add, prompt_embeds=None) if embeds else add, embeds)
        structured = add.sampling.structured_outputs
        return self._inbox.put(admitted, None if structured is None else self._executor.prepare_grammar(structured))

    def abort(self, client: int, request_id: int, reason: str = "abort") -> None:
        """Forget a request and free its blocks before the next step. Unknown ids are passed over."""
        assert reason in REASONS, reason
        self._inbox.abort(client, request_id, reason)

    def abort_client(self, client: int) -> None:
        """Forget all requests of a client."""
        self._inbox.abort_client(client)

    def load(self) -> Load:
        """How busy the engine is."""
        return self._load

    def stalled_s(self) -> float:
        """Seconds since the step under way began; 0 when idle."""
        began = self._step_began
        return time.monotonic() - began if began else 0.0

    @property
    def dead(self) -> str | None:
        """Why the loop ended by a fault, or None."""
        return self._inbox.dead

    def stats(self) -> EngineStats:
        """All metrics at this moment."""
        metrics, counters, pool = self._metrics, self._scheduler.counters, self._pool
        return EngineStats(
            load=self._load, prompt_tokens=metrics.prompt_tokens, generation_tokens=metrics.generation_tokens,
            preemptions=counters.preemptions, prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits, cascade_steps=metrics.cascade_steps, finished=dict(metrics.finished),
            blocks_total=pool.num_blocks, blocks_free=pool.free,
            histograms={name: d.snapshot() for name, d in metrics.histograms.items()},
            estimates=dict(self._work.totals) if self._work is not None else {},
        )  # fmt: skip

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker, between steps; one result a worker. See --worker-extension-cls.

        Raises:
            AttributeError: workers have no such method.
            Exception: what the method raises.
        """
        return self._executor.collective_rpc(method, *args, **kwargs)

    def carry_out(self, command: Command) -> Any:
        """Carry out a command between two steps, or for a pause once no request moves; what it answers.

        Raises:
            RequestError: the command cannot be carried out.
            EngineDead: the engine serves no more.
            Exception: what a worker's method raises.
        """
        return self._commands.carry_out(command)

    def check(self) -> None:
        """Assert the invariants of an idle engine: no request, no block held. For tests."""
        assert not self._requests, self._requests
        assert not self._inbox.open, self._inbox.open
        assert not self._sent, self._sent
        self._pool.check()
        assert self._pool.stats().held == 0, self._pool.stats()

    def shutdown(self) -> None:
        """End the loop and the workers. Requests that are open get no more outputs. Idempotent."""
        self._inbox.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=30)
        self._executor.shutdown()

    # -- the loop

    def _run(self) -> None:
        try:
            while self._take_inbox():
                outputs = self._step()
                if outputs:
                    self._deliver(outputs, self._load)
        except Exception as error:
            log.exception("the engine failed")
            self._die(f"{type(error).__name__}: {error}")
        finally:
            self._inbox.fail_tasks()
            for drained in self._pause.draining:
                drained.set_exception(self._inbox.closed())

    def _take_inbox(self) -> bool:
        """Wait for something to do and take in what callers left. False at the end."""
        still = self._still()
        if still:
            self._pause.note_drained()
        taken = self._inbox.take(self._note_idle if still else None)
        if taken is None:
            return False
        self._step_began = time.monotonic()
        for item in taken.items:
            if isinstance(item, Admitted):
                request = self._admission.make_request(item.client, item.add, time.time(), item.embeds)
                request.grammar = item.grammar
                self._requests[request.key] = request
                if not self._pause.holds(request):
                    self._scheduler.add(request)
            else:
                self._take_out(item)
        for work, done in taken.tasks:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
        return True

    def _take_out(self, aborted: Aborted) -> None:
        if aborted.request_id is None:
            for key in [key for key in self._requests if key[0] == aborted.client]:
                self._end(self._requests[key], aborted.reason)
        elif request := self._requests.get((aborted.client, aborted.request_id)):
            self._end(request, aborted.reason)

    def _note_idle(self) -> None:
        self._step_began = 0.0
        self._update_load()

    def _still(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._sent and (self._pause.mode == "keep" or len(self._requests) == len(self._pause.held))

    def _step(self) -> Outputs:
        """Send the next step, if there is one, and take in the oldest when enough are under way."""
        step = None if self._pause.mode == "keep" else self._scheduler.plan()
        if step is not None:
            self._note_started(step)
            if self._work is not None:
                self._work.add(step)
            if self._iterations is not None:
                self._iterations.note_sent(step)
            self._sent.append((step, self._executor.submit(step.plan)))
        if not self._sent or (step is not None and len(self._sent) < self._depth):
            return {}
        step, future = self._sent.popleft()
        result = future.result()
        if self._iterations is not None:
            self._iterations.note_back(step)
        outputs: Outputs = {}
        now = time.time()
        self._note_spent(step, result)
        self._metrics.cascade_steps += result.cascade
        for request, output in self._scheduler.commit(step, result):
            self._count(request, output, now)
            if output.cached_tokens is not None or output.finish_reason is not None:
                output = msgspec.structs.replace(output, times=self._times(request, now))
            if (send := self._interval.take(request, output)) is not None:
                outputs.setdefault(request.client, []).append(send)
        self._update_load()
        return outputs

    def _note_started(self, step: PlannedStep) -> None:
        if step.plan.start:
            now = time.time()
            for request in step.requests:
                if not request.running_time:
                    request.running_time = now
                    self._metrics.histograms["request_queue_time_seconds"].observe(now - request.queued_time)

    def _note_spent(self, step: PlannedStep, result: StepResult) -> None:
        if step.plan.start:
            for request in step.requests:
                if request.spent_before is None:
                    request.spent_before = self._spent
        self._spent = (self._spent[0] + result.times[0], self._spent[1] + result.times[1])

    def _times(self, request: Request, now: float) -> RequestTimes:
        model, worker = request.spent_before or self._spent
        return RequestTimes(
            queued=request.running_time - request.queued_time,
            prefill=request.first_token_time - request.running_time,
            decode=now - request.first_token_time,
            model=self._spent[0] - model,
            worker=self._spent[1] - worker,
        )

    def _end(self, request: Request, reason: str) -> None:
        if self._pause.held.pop(request.key, None) is None and request.state is not State.FINISHED:
            self._scheduler.finish(request)
        self._forget(request, reason, time.time())

    def _count(self, request: Request, output: RequestOutput, now: float) -> None:
        """Keep the metrics of one output, and forget the request if it is its last."""
        metrics = self._metrics
        metrics.generation_tokens += len(output.token_ids)
        if output.cached_tokens is not None:
            request.first_token_time = now
            metrics.prompt_tokens += request.num_prompt
            # A request that lost its engine had its first token there.
            if not request.add.output_token_ids:
                metrics.histograms["time_to_first_token_seconds"].observe(now - request.add.arrival_time)
        else:
            metrics.histograms["inter_token_latency_seconds"].observe(now - request.last_token_time)
        request.last_token_time = now
        if output.finish_reason is not None:
            metrics.histograms["request_prompt_tokens"].observe(request.num_prompt)
            metrics.histograms["request_generation_tokens"].observe(request.num_output)
            self._forget(request, output.finish_reason, now)

    def _forget(self, request: Request, reason: str, now: float) -> None:
        del self._requests[request.key]
        self._inbox.forget(request.key)
        self._metrics.finished[reason] += 1
        self._metrics.histograms["e2e_request_latency_seconds"].observe(now - request.add.arrival_time)

    def _abort(self, which: Callable[[Request], bool]) -> int:
        """End requests with what they have so far, and tell their clients. How many."""
        found = [request for request in self._requests.values() if which(request)]
        outputs: Outputs = {}
        for request in found:
            output = RequestOutput(request.add.request_id, finish_reason="abort")
            if request.unsent is not None:
                output = merge(request.unsent, output)
            outputs.setdefault(request.client, []).append(output)
            self._end(request, "abort")
        self._update_load()
        if outputs:
            self._deliver(outputs, self._load)
        return len(found)

    def _update_load(self) -> None:
        scheduler, stats = self._scheduler, self._pool.stats()
        waiting = scheduler.num_waiting + len(self._pause.held)
        self._load = Load(
            running=len(scheduler.running), waiting=waiting, tokens_waiting=scheduler.tokens_waiting,
            kv_usage=stats.held / self._pool.num_blocks,
        )  # fmt: skip

    def _die(self, reason: str) -> None:
        """End all requests with an error and refuse new ones."""
        keys = [*self._requests, *self._inbox.die(reason)]
        outputs: Outputs = {}
        for client, request_id in keys:
            output = RequestOutput(request_id, finish_reason="error", error="the engine failed")
            outputs.setdefault(client, []).append(output)
            self._metrics.finished["error"] += 1
        self._requests.clear()
        self._load = Load()
        self._deliver(outputs, self._load)


def build_scheduler(config: EngineConfig, pool: BlockPool) -> Scheduler:
    """The scheduler of an engine with these KV blocks.

    Raises:
        ConfigError: its class or its hash needs what is not installed.
    """
    if config.scheduler_cls is not None:
        log.info("scheduler: %s", config.scheduler_cls)
    return scheduler_class(config.scheduler_cls)(limits_of(config), pool, hash_named(config.prefix_hash))


def limits_of(config: EngineConfig) -> Limits:
    """What bounds the steps of an engine."""
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        prefix_caching=config.enable_prefix_caching,
        by_priority=config.scheduling_policy == "priority",
        chunked_prefill=config.chunked_prefill,
        max_partial_prefills=config.max_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        long_prefill_tokens=config.long_prefill_tokens,
        reserve_whole=config.reserve_whole_prompt,
        layout=config.kv_layout,
        stages=config.parallel.stages,
    )


def scheduler_class(path: str | None) -> type[Scheduler]:
    """The scheduler that --scheduler-cls names as `module:Class`, or our own.

    Raises:
        ConfigError: it cannot be imported, or is no subclass of ours.
    """
    return Scheduler if path is None else load_class("--scheduler-cls", path, Scheduler)


def _allocate(executor: Executor, blocks: int, config: EngineConfig) -> None:
    try:
        executor.allocate(blocks)
    except (OSError, MemoryError) as error:
        option = "--kv-cache-memory-bytes" if config.num_blocks is None else "--num-gpu-blocks-override"
        size = blocks * executor.kv_bytes_per_block()
        raise ConfigError(option, f"{size} bytes of KV cache cannot be had ({error})", "lower it") from None


def count_blocks(config: EngineConfig, executor: Executor) -> int:
    """How many KV blocks the engine gets: the number set, or what the bytes set or the free memory allow.

    Raises:
        ConfigError: they cannot hold one request of `max_model_len` tokens.
    """
    block_bytes = executor.kv_bytes_per_block()
    if config.num_blocks is not None:
        blocks, option = config.num_blocks, "--num-gpu-blocks-override"
    elif config.kv_cache_memory_bytes is not None:
        blocks, option = config.kv_cache_memory_bytes // block_bytes, "--kv-cache-memory-bytes"
    else:
        blocks, option = executor.available_kv_bytes() // block_bytes, "--kv-cache-memory-bytes"
    layout, step = config.kv_layout, (config.max_num_batched_tokens, config.block_size)
    need = layout.most_blocks(config.max_model_len, *step)
    if blocks < need:
        fits = layout.longest(blocks, *step, config.max_model_len)
        raise ConfigError(
            option,
            f"{blocks} blocks of {config.block_size} tokens cannot hold one request of "
            f"--max-model-len {config.max_model_len} tokens, which takes {need} blocks",
            f"raise it to {need if config.num_blocks is not None else need * block_bytes}"
            + (f" or lower --max-model-len to {fits}" if fits > 0 else ""),
        )
    return blocks
