"""The process of one rank: it carries out what its executor sends, in order, until that ends it or is gone."""

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rayllm.config.engine import EngineConfig
from rayllm.errors import RayLLMError
from rayllm.executor.link import Link, LinkAddress, LinkError
from rayllm.executor.uni import worker_class
from rayllm.messages.rank import (
    Allocate,
    Answered,
    Ask,
    CallMethod,
    DropGrammar,
    End,
    Failed,
    Listen,
    LoadModel,
    Meet,
    PrepareGrammar,
    RunStep,
    StepDone,
)
from rayllm.messages.worker import StepResult
from rayllm.parallel.meeting import Meeting, Place, join, leave
from rayllm.worker.worker import Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Which rank a process is, and with how many it shares its machine."""

    rank: int
    beside: int
    """Ranks of the engine on its machine."""
    host: str
    """Address of its machine, for other ranks."""


def run_rank(config: EngineConfig, seat: Seat, address: LinkAddress, patience_s: float = 0.0) -> None:
    """Serve as a rank until the executor ends it, or is gone. An executor that is not there yet is waited for.

    Raises:
        LinkError: the executor cannot be reached.
    """
    size = config.parallel.size
    link = Link(address, seat.rank, size, aside=False, patience_s=patience_s)
    aside = Link(address, seat.rank, size, aside=True)
    rank = _Rank(config, seat, link, aside)
    threading.Thread(target=rank.serve_aside, name="rllm-aside", daemon=True).start()
    rank.serve()


class _Rank:
    def __init__(self, config: EngineConfig, seat: Seat, link: Link, aside: Link) -> None:
        engines, cpus = config.engines_on_host, len(os.sched_getaffinity(0))
        # Ranks that are bound have CPUs of their own.
        sharers = engines * (1 if config.parallel.numactl else seat.beside)
        self._config = replace(config, engines_on_host=engines * seat.beside, threads=max(1, cpus // sharers))
        self._seat, self._link, self._aside = seat, link, aside
        self._meeting: Meeting | None = None
        self._place = Place()
        self._worker: Worker | None = None
        self._grammars: dict[int, object] = {}

    def serve(self) -> None:
        """Carry out steps, and what goes in order with them."""
        while True:
            try:
                message = self._link.receive()
            except LinkError as error:
                log.info("rank %d ends: %s", self._seat.rank, error)
                break
            match message:
                case RunStep():
                    result = self._run(message)
                    if result is not None:
                        self._link.send(StepDone(result))
                case Ask():
                    self._link.send(self._answer(message))
                case End():
                    break
        self._end()

    def serve_aside(self) -> None:
        """Compile grammars while steps run. When the executor goes, the process goes, whatever it is at."""
        with suppress(LinkError):
            while True:
                match self._aside.receive():
                    case Ask(number, PrepareGrammar(asked)):
                        self._prepare(number, asked)
                    case DropGrammar(number):
                        self._grammars.pop(number, None)
        os._exit(1)

    def _run(self, message: RunStep) -> StepResult | None:
        assert self._worker is not None
        try:
            self._worker.note_sampled(message.rows, message.token_ids)
            return self._worker.execute(message.plan)
        except Exception as error:
            log.exception("rank %d cannot go on", self._seat.rank)
            with suppress(LinkError):
                self._link.send(Failed(f"{type(error).__name__}: {error}"))
            raise SystemExit(1) from error

    def _answer(self, ask: Ask) -> Answered:
        try:
            value = self._carry_out(ask.what)
            return Answered(ask.number, msgspec.to_builtins(value, enc_hook=repr))
        except Exception as error:
            if not isinstance(error, RayLLMError | AttributeError | TypeError | ValueError):
                log.exception("rank %d: %s", self._seat.rank, type(ask.what).__name__)
            return _failed(ask.number, error)

    def _carry_out(self, what: Any) -> Any:
        match what:
            case Listen():
                self._meeting = Meeting(self._seat.host)
                return self._meeting.host, self._meeting.port
            case Meet(host, port):
                self._place = join(self._config.parallel, self._seat.rank, host, port, self._meeting)
            case LoadModel():
                worker = self._worker = worker_class(self._config)(self._config, self._place)
                return worker.kv_bytes_per_block(), worker.available_kv_bytes(), sorted(worker.logits_processor_names())
            case Allocate(num_blocks):
                assert self._worker is not None
                self._worker.allocate(num_blocks)
            case CallMethod(method, args, kwargs):
                return getattr(self._worker, method)(*args, **kwargs)
        return None

    def _prepare(self, number: int, asked: Any) -> None:
        assert self._worker is not None
        try:
            compiled = self._worker.grammars.prepare(asked)
        except Exception as error:
            self._aside.send(_failed(number, error))
            return

        def answer(done: Any) -> None:
            with suppress(LinkError):
                if error := done.exception():
                    self._aside.send(_failed(number, error))
                else:
                    self._grammars[number] = done.result()
                    self._aside.send(Answered(number))

        compiled.add_done_callback(answer)

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        leave()


def _failed(number: int, error: BaseException) -> Answered:
    """As `rayllm.executor.ranked` makes it anew: with the arguments of the error's class."""
    match error:
        case RayLLMError():
            values = vars(error)
            names = error.__init__.__code__.co_varnames[1 : error.__init__.__code__.co_argcount]  # type: ignore[misc]
            arguments = [values[name] for name in names if name in values] or list(error.args)
        case _:
            arguments = [str(error)]
    return Answered(number, error=type(error).__name__, arguments=arguments)
