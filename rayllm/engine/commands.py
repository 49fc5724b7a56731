"""Commands of trainers and developers, which an engine carries out between two steps."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rayllm.engine.inbox import Inbox
from rayllm.engine.pause import Paused, names_of
from rayllm.engine.request import Request
from rayllm.engine.scheduler import Scheduler
from rayllm.errors import RequestError
from rayllm.executor.base import Executor
from rayllm.kv.blocks import BlockPool
from rayllm.messages.engine import (
    AbortNamed,
    CallWorkers,
    Command,
    IsPaused,
    Pause,
    PauseMode,
    Profile,
    ResetPrefixCache,
    Resume,
)


class Commands:
    """Carries out commands on the parts of one engine, in its loop where they touch what is the loop's."""

    def __init__(
        self,
        inbox: Inbox,
        pause: Paused,
        scheduler: Scheduler,
        pool: BlockPool,
        executor: Executor,
        abort: Callable[[Callable[[Request], bool]], int],
        profiles: bool,
    ) -> None:
        """`abort` ends the requests that its argument finds, in the loop; `profiles` says whether workers can."""
        self._inbox = inbox
        self._pause = pause
        self._scheduler = scheduler
        self._pool = pool
        self._executor = executor
        self._abort = abort
        self._profiles = profiles

    def carry_out(self, command: Command) -> Any:
        """See `Engine.carry_out`."""
        match command:
            case Profile():
                if not self._profiles:
                    raise RequestError("profiles need --profiler-config")
                return self._executor.profile(command.begin)
            case CallWorkers():
                try:
                    return self._executor.collective_rpc(command.method, *command.args, **command.kwargs)
                except AttributeError as error:
                    raise RequestError(str(error), "method") from None
            case ResetPrefixCache():
                return self._inbox.do(lambda: self._reset_cache(command.preempt)).result()
            case Pause():
                drained: Future[None] = Future()
                self._inbox.do(lambda: self._begin_pause(command.mode, drained)).result()
                return drained.result()
            case Resume():
                return self._inbox.do(self._resume).result()
            case IsPaused():
                return self._pause.mode is not None
            case AbortNamed():
                return self._inbox.do(lambda: self._abort_named(frozenset(command.names))).result()

    def _reset_cache(self, preempt: bool) -> None:
        if preempt:
            self._scheduler.preempt_all()
        self._pool.drop_cache()

    def _begin_pause(self, mode: PauseMode, drained: "Future[None]") -> None:
        self._pause.begin(mode, drained)
        if mode == "abort":
            self._abort(lambda request: True)

    def _resume(self) -> None:
        for request in self._pause.end():
            self._scheduler.add(request)

    def _abort_named(self, names: frozenset[str]) -> int:
        return self._abort(lambda request: bool(names & names_of(request.add.external_id)))
