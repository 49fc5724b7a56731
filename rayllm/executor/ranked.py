"""Many workers, each a rank in a process of its own, wherever a `Launcher` starts them."""

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from rayllm import errors
from rayllm.config.engine import EngineConfig
from rayllm.errors import ConfigError
from rayllm.executor.link import Hub, LinkAddress
from rayllm.messages.rank import (
    Allocate,
    Answered,
    Ask,
    CallMethod,
    DropGrammar,
    End,
    Failed,
    FromRank,
    Listen,
    LoadModel,
    Meet,
    PrepareGrammar,
    RunStep,
    StepDone,
)
from rayllm.messages.structured import StructuredOutputs
from rayllm.messages.worker import StepPlan, StepResult

log = logging.getLogger(__name__)

START_S = 600.0
"""How long ranks may take to come, where --distributed-timeout-seconds does not say."""
WATCH_S = 0.2


class WorkerDied(Exception):
    """A rank ended or failed, and with it the engine."""


class Launcher(Protocol):
    """Starts the processes of ranks, and knows when one has ended."""

    bind: tuple[str, int] | None
    """Where in the network ranks of other machines find the executor; None: all are on this one."""
    secret: str | None
    """What ranks know that were not told the executor's address; None: all are told."""

    def start(self, address: LinkAddress) -> None:
        """Start them; they connect to `address`.

        Raises:
            ConfigError: they cannot be had.
        """
        ...

    def check(self) -> None:
        """Raise `WorkerDied` if one has ended."""
        ...

    def missing(self) -> str:
        """What to do about ranks that do not come."""
        ...

    def stop(self) -> None:
        """End what still runs. Idempotent."""
        ...


class RankedGrammar:
    """A grammar that the rank which chooses tokens holds as long as this lives."""


class RankedExecutor:
    """Sends each step once to all ranks; the rank that chooses tokens sends back the result."""

    def __init__(self, config: EngineConfig, launcher: Launcher) -> None:
        """Start the ranks and load the model.

        Raises:
            ConfigError, ModelError: an option or the model cannot be used.
            WorkerDied: a rank failed otherwise.
        """
        self._config, self._launcher = config, launcher
        settings = config.parallel
        self._ranks = list(range(settings.size))
        self._leader = settings.size - settings.tensor
        """The rank that chooses tokens: the first of the last stage."""
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._steps: deque[tuple[Future[StepResult], set[int]]] = deque()
        """With each, rows that other requests have taken since: these results are no tokens of theirs."""
        self._asked: dict[tuple[int, int], Future[Any]] = {}
        """By rank and number."""
        self._fresh: tuple[list[int], list[int]] = [], []
        """Rows and tokens of results that the earlier stages do not know yet."""
        self._dead: Exception | None = None
        self._ended = False
        self._hub = Hub(settings.size, self._take, self._lose, launcher.bind, launcher.secret)
        try:
            launcher.start(self._hub.address)
            self._start()
        except BaseException:
            self.shutdown()
            raise

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block, on the rank that needs most."""
        return self._kv_bytes_per_block

    def available_kv_bytes(self) -> int:
        """Bytes for as many blocks as every rank has room for."""
        return self._most_blocks * self._kv_bytes_per_block

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV caches."""
        self._ask_all(Allocate(num_blocks))

    def logits_processor_names(self) -> frozenset[str]:
        """Names of the loaded logits processors."""
        return self._processors

    def prepare_grammar(self, asked: StructuredOutputs) -> "Future[Any]":
        """Compile a grammar at the rank that chooses tokens."""
        number, compiled = self._ask(PrepareGrammar(asked), [self._leader], aside=True)
        answer: Future[Any] = Future()

        def settle(done: "Future[Any]") -> None:
            if error := done.exception():
                answer.set_exception(error)
                return
            grammar = RankedGrammar()
            weakref.finalize(grammar, self._send, DropGrammar(number), [self._leader], True)
            answer.set_result(grammar)

        compiled[0].add_done_callback(settle)
        return answer

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker, after the steps that were submitted. Arguments and results are plain data."""
        try:
            msgspec.msgpack.encode((args, kwargs))
        except (TypeError, OverflowError) as error:
            raise TypeError(f"arguments to workers in other processes must be plain data: {error}") from None
        return self._ask_all(CallMethod(method, list(args), kwargs))

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """Send a step to all ranks."""
        future: Future[StepResult] = Future()
        with self._state:
            if self._dead is not None:
                future.set_exception(self._dead)
                return future
            for _, taken in self._steps:
                taken.update(start.row for start in plan.start)
            self._steps.append((future, set()))
            rows, token_ids = self._fresh
            self._fresh = [], []
        self._send(RunStep(plan, rows, token_ids), self._ranks)
        return future

    def profile(self, begin: bool) -> None:
        """Begin profiles of the workers, or end them and write their traces."""
        self._ask_all(CallMethod("profile", [begin]))

    def shutdown(self) -> None:
        """End the ranks."""
        with self._state:
            if self._ended:
                return
            self._ended = True
        self._send(End(), self._ranks)
        self._launcher.stop()
        self._hub.close()
        self._fail(WorkerDied("the engine is shutting down"))

    def _start(self) -> None:
        settings = self._config.parallel
        limit = settings.timeout_s or START_S
        if not self._hub.wait_complete(limit, self._check):
            reason = f"not all of the {settings.size} workers came within {limit:g} s"
            raise ConfigError("--distributed-timeout-seconds", reason, self._launcher.missing())
        host, port = self._ask_all(Listen(), [0])[0]
        self._ask_all(Meet(host, port))
        loaded: list[tuple[int, int, list[str]]] = []
        turn = settings.loading or settings.size
        for first in range(0, settings.size, turn):
            loaded += self._ask_all(LoadModel(), self._ranks[first : first + turn])
        self._kv_bytes_per_block = max(each for each, _, _ in loaded)
        self._most_blocks = min(room // each for each, room, _ in loaded if each)
        self._processors = frozenset(loaded[self._leader][2])
        log.info(
            "%d workers: %d ranks to a layer, %d stages of layers", settings.size, settings.tensor, settings.stages
        )

    def _check(self) -> None:
        if self._dead is not None:
            raise self._dead
        self._launcher.check()

    # -- to the ranks

    def _send(self, message: RunStep | Ask | DropGrammar | End, ranks: Sequence[int], aside: bool = False) -> None:
        with self._sending:
            self._hub.send(message, ranks, aside)

    def _ask(self, what: Any, ranks: Sequence[int], aside: bool = False) -> "tuple[int, list[Future[Any]]]":
        number = next(self._numbers)
        answers: list[Future[Any]] = [Future() for _ in ranks]
        with self._state:
            if self._dead is not None:
                for answer in answers:
                    answer.set_exception(self._dead)
                return number, answers
            self._asked.update({(rank, number): answer for rank, answer in zip(ranks, answers, strict=True)})
        self._send(Ask(number, what), ranks, aside)
        return number, answers

    def _ask_all(self, what: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Their answers. Returns, or raises, when the last of them has answered."""
        _, answers = self._ask(what, self._ranks if ranks is None else ranks)
        for answer in answers:
            while True:
                try:
                    answer.exception(timeout=WATCH_S)
                    break
                except TimeoutError:
                    self._check()
        return [answer.result() for answer in answers]

    # -- from the ranks, on the hub's thread

    def _take(self, rank: int, message: FromRank) -> None:
        match message:
            case StepDone():
                with self._state:
                    future, taken = self._steps.popleft()
                    if self._config.parallel.stages > 1:
                        result = message.result
                        for row, token in zip(result.rows, result.token_ids, strict=True):
                            if row not in taken:
                                self._fresh[0].append(row)
                                self._fresh[1].append(token)
                future.set_result(message.result)
            case Answered():
                with self._state:
                    answer = self._asked.pop((rank, message.number))
                if message.error is None:
                    answer.set_result(message.value)
                else:
                    answer.set_exception(_error(rank, message))
            case Failed():
                self._fail(WorkerDied(f"worker {rank} failed: {message.reason}"))

    def _lose(self, rank: int, reason: str) -> None:
        self._fail(WorkerDied(f"worker {rank} is gone: {reason}"))

    def _fail(self, error: Exception) -> None:
        with self._state:
            if self._dead is None:
                self._dead = error
            waiting = [*(future for future, _ in self._steps), *self._asked.values()]
            self._steps.clear()
            self._asked.clear()
        for future in waiting:
            future.set_exception(self._dead)


def _error(rank: int, message: Answered) -> Exception:
    """The error that a rank told of: one of ours, or a plain one as it was raised in process."""
    known = {**vars(errors), "AttributeError": AttributeError, "TypeError": TypeError, "ValueError": ValueError}
    cls = known.get(message.error or "")
    if isinstance(cls, type) and issubclass(cls, Exception):
        return cls(*message.arguments)
    if message.error in ("OSError", "MemoryError"):
        return MemoryError(*message.arguments)
    return WorkerDied(f"worker {rank}: {message.error}: {' '.join(map(str, message.arguments))}")
