"""All engines as one ingress sees them: keeps a session with each, places requests, and moves them when one is lost."""

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from rayllm.errors import ContextTooLong, Overloaded, RayLLMError, ReplicaLost, RequestError
from rayllm.messages.engine import Add, Command
from rayllm.messages.ingress import EngineStats, Rejected
from rayllm.serving.session_client import Session
from rayllm.serving.session_server import Address
from rayllm.serving.streams import RequestStream
from rayllm.serving.wire import SessionLimits

log = logging.getLogger(__name__)

Chooser = Callable[[Sequence[str]], Awaitable[str | None]]
"""Picks one of several engines by id, or None where it has no opinion."""
STATS_S = 5.0


class Directory(Protocol):
    """Where the engine replicas are."""

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        """Call `changed` with the ids of all replicas, now and whenever they change; from any thread."""
        ...

    async def open(self, replica_id: str) -> Address:
        """How to open a session with a replica. Any exception means that it is not to be had now."""
        ...

    async def wake(self) -> None:
        """Return when a replica runs. As long as somebody waits here, one is to be started where there is none."""
        ...


class Fleet:
    """Sessions with all engines. Belongs to the event loop in which `start` was called."""

    def __init__(
        self,
        directory: Directory,
        ingress_id: str,
        limits: SessionLimits | None = None,
        choose: Chooser | None = None,
        from_zero: bool = False,
    ) -> None:
        """With `from_zero` engines come up when they are asked for, and having none is no fault."""
        self._directory = directory
        self._ingress_id = ingress_id
        self._limits = limits or SessionLimits()
        self._choose = choose
        self._from_zero = from_zero
        self._request_ids = itertools.count(1)
        self._listed: frozenset[str] = frozenset()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._sessions: dict[str, Session] = {}
        self._moves: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._waiting = 0
        """Requests that wait for an engine to come up."""
        self._waker: asyncio.Task[None] | None = None
        self._last_failure = "no engine has been seen yet"
        self._closed = False
        self.placed = 0
        """Requests that engines admitted so far."""

    def start(self) -> None:
        """Begin to look for engines."""
        loop = asyncio.get_running_loop()

        def changed(replica_ids: frozenset[str]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._update, replica_ids)

        self._directory.watch(changed)

    async def close(self) -> None:
        """Close all sessions; what runs fails with `ReplicaLost`."""
        self._closed = True
        self._changed.set()
        tasks = [*self._keepers.values(), *self._moves, *([self._waker] if self._waker else [])]
        for task in tasks:
            task.cancel()
        for session in list(self._sessions.values()):
            session.close("the server is shutting down")
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    # -- what the ingress asks

    def sessions(self) -> list[Session]:
        """The open sessions."""
        return list(self._sessions.values())

    def healthy(self) -> str | None:
        """None while an engine serves, or would if it were asked; else why none does."""
        if self._sessions or (self._from_zero and not self._listed):
            return None
        return self._last_failure

    def load(self) -> int:
        """Requests that run or wait in all engines."""
        return sum(session.score for session in self._sessions.values())

    async def stats(self) -> dict[str, EngineStats]:
        """The metrics of every engine that answers within five seconds, by engine id."""

        async def ask(session: Session) -> EngineStats | None:
            try:
                async with asyncio.timeout(STATS_S):
                    return await session.stats()
            except (ConnectionError, TimeoutError):
                return None

        sessions = self.sessions()
        answers = await asyncio.gather(*map(ask, sessions))
        return {s.engine_id: stats for s, stats in zip(sessions, answers, strict=True) if stats is not None}

    async def command(self, command: Command) -> list[Any]:
        """Have every engine that serves now carry out a command; what each answers.

        Raises:
            RequestError: the command cannot be carried out.
            Overloaded: no engine serves.
            RayLLMError: an engine failed at it.
        """
        sessions = self.sessions()
        if not sessions:
            raise Overloaded(f"no engine serves now: {self._last_failure}", retry_after=5.0)
        answers = await asyncio.gather(*(one.command(command) for one in sessions), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, RequestError):
                raise answer
        pairs = zip(sessions, answers, strict=True)
        failed = [f"engine {one.engine_id}: {answer}" for one, answer in pairs if isinstance(answer, BaseException)]
        if failed:
            raise RayLLMError("; ".join(failed))
        return answers

    async def submit(self, adds: Sequence[Add]) -> list[RequestStream]:
        """Place all choices of one request, and wait until each is admitted. On any failure the others are aborted.

        Raises:
            RequestError: an engine refused one as wrong.
            Overloaded: no engine takes it now.
        """
        streams = [RequestStream(replace(add, request_id=next(self._request_ids))) for add in adds]
        try:
            if len(streams) == 1:
                await self._place_new(streams)
            else:
                async with asyncio.TaskGroup() as group:
                    for alike in _by_prompt(streams):
                        group.create_task(self._place_new(alike))
        except BaseExceptionGroup as errors:
            _abort_all(streams)
            raise errors.exceptions[0] from None
        except BaseException:
            _abort_all(streams)
            raise
        return streams

    # -- placing

    async def _place_new(self, streams: Sequence[RequestStream]) -> None:
        """Place choices of one prompt, in one engine if it takes them all, so that they share its blocks."""
        try:
            wait_s = self._limits.replica_wait_s if self._from_zero else self._limits.admit_wait_s
            first = await self._place(streams[0], wait_s)
            await asyncio.gather(*(self._place(stream, wait_s, first) for stream in streams[1:]))
        except ReplicaLost as error:
            raise Overloaded(str(error), retry_after=5.0) from error

    async def _place(self, stream: RequestStream, wait_s: float, preferred: Session | None = None) -> Session | None:
        """Find an engine that admits a request, waiting so long if there is none. None if it was aborted meanwhile.

        Raises:
            RequestError, Overloaded: as `submit`.
            ReplicaLost: there is no engine, and none came in time.
        """
        refused: dict[str, Rejected] = {}
        deadline = asyncio.get_running_loop().time() + wait_s
        while not stream.done:
            session = preferred if preferred and preferred.lost is None else await self._pick(refused, deadline)
            preferred = None
            if session is None:
                raise Overloaded(next(iter(refused.values())).message)
            if stream.done:
                break
            stream.place = session
            try:
                refusal = await session.offer(stream)
            except ConnectionError:
                continue
            if refusal is None:
                self.placed += 1
                return session
            if refusal.kind == "request":
                raise _request_error(refusal)
            refused[session.engine_id] = refusal
        return None

    async def _pick(self, refused: Iterable[str], deadline: float) -> Session | None:
        """The engine to try next; None when all there are have refused.

        Raises:
            ReplicaLost: there is none until the deadline, or will be none since the fleet is closed.
        """
        while not self._sessions:
            if self._closed:
                raise ReplicaLost("the server is shutting down")
            self._changed.clear()
            try:
                with self._waking():
                    async with asyncio.timeout_at(deadline):
                        await self._changed.wait()
            except TimeoutError:
                raise ReplicaLost(f"no engine serves now: {self._last_failure}") from None
        open_ = [s for s in self._sessions.values() if s.engine_id not in refused]
        listed = [s for s in open_ if s.engine_id in self._listed] or open_
        if self._choose is not None and len(listed) > 1:
            chosen = await self._choose([s.engine_id for s in listed])
            for session in listed:
                if session.engine_id == chosen and session.lost is None:
                    return session
        return min(listed, key=lambda s: (s.score, random.random()), default=None)

    @contextlib.contextmanager
    def _waking(self) -> Iterator[None]:
        """Have an engine brought up while somebody waits for one."""
        self._waiting += 1
        if self._waker is None and self._from_zero:
            self._waker = asyncio.get_running_loop().create_task(self._wake())
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0 and self._waker is not None:
                self._waker.cancel()
                self._waker = None

    async def _wake(self) -> None:
        while True:
            if not self._listed:
                try:
                    await self._directory.wake()
                except Exception as error:
                    self._last_failure = f"no engine came up: {error or type(error).__name__}"
                    log.debug("no engine came up: %r", error)
            await asyncio.sleep(self._limits.retry_s)

    async def _move(self, stream: RequestStream) -> None:
        """Find a new place for a request whose engine is gone."""
        try:
            await self._place(stream, self._limits.replica_wait_s)
        except (Overloaded, RequestError, ReplicaLost) as error:
            stream.fail(ReplicaLost(f"the engine of this request is gone and no other could go on with it: {error}"))
        except asyncio.CancelledError:
            stream.fail(ReplicaLost("the server is shutting down"))
            raise

    # -- keeping sessions

    def _update(self, replica_ids: frozenset[str]) -> None:
        if self._closed:
            return
        self._listed = replica_ids
        for replica_id in self._keepers.keys() - replica_ids - self._sessions.keys():
            # Its call would wait for a replica that is gone, and look to Serve as if it asked for another.
            self._keepers[replica_id].cancel()
        for replica_id in replica_ids - self._keepers.keys():
            task = asyncio.get_running_loop().create_task(self._keep(replica_id))
            self._keepers[replica_id] = task
            task.add_done_callback(lambda _, ended=replica_id: self._keeper_ended(ended))  # type: ignore[misc]

    def _keeper_ended(self, replica_id: str) -> None:
        del self._keepers[replica_id]
        if replica_id in self._listed:  # listed again while it ended
            self._update(self._listed)

    async def _keep(self, replica_id: str) -> None:
        """Keep a session with one replica, as long as it is listed."""
        pause = self._limits.retry_s
        while replica_id in self._listed:
            try:
                async with asyncio.timeout(self._limits.open_s):
                    address = await self._directory.open(replica_id)
                session = await Session.open(address, self._ingress_id, self._limits, self._on_lost)
            except Exception as error:
                self._last_failure = f"engine {replica_id}: {error or type(error).__name__}"
                log.debug("no session with engine %s: %r", replica_id, error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 20 * self._limits.retry_s)
                continue
            pause = self._limits.retry_s
            log.info("session with engine %s is open", replica_id)
            self._sessions[replica_id] = session
            self._changed.set()
            try:
                self._last_failure = f"engine {replica_id}: {await session.wait_lost()}"
            except asyncio.CancelledError:
                session.close("the server is shutting down")
                raise
            log.warning("session with engine %s is lost: %s", replica_id, session.lost)

    def _on_lost(self, session: Session, streams: list[RequestStream]) -> None:
        for replica_id in [r for r, s in self._sessions.items() if s is session]:
            del self._sessions[replica_id]
        for stream in streams:
            if self._closed:
                stream.fail(ReplicaLost("the server is shutting down"))
                continue
            task = asyncio.get_running_loop().create_task(self._move(stream))
            self._moves.add(task)
            task.add_done_callback(self._moves.discard)


def _abort_all(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.abort()


def _request_error(refusal: Rejected) -> RequestError:
    kind = ContextTooLong if refusal.code == ContextTooLong.code else RequestError
    return kind(refusal.message, refusal.param)


def _by_prompt(streams: Sequence[RequestStream]) -> list[list[RequestStream]]:
    groups: dict[tuple[int, ...], list[RequestStream]] = {}
    for stream in streams:
        groups.setdefault(tuple(stream.add.prompt_token_ids), []).append(stream)
    return list(groups.values())
