"""Questions that wait at the same moment share one call."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class Batcher(Generic[Q, A]):
    """Asks `call` with a list of questions, one call at a time; answers come back in the same order.

    The first question goes at once; those that come while its call runs go together in the next.
    """

    def __init__(self, call: Callable[[Sequence[Q]], Awaitable[Sequence[A]]], limit: int = 64) -> None:
        """`limit` is the most questions in one call."""
        self._call = call
        self._limit = limit
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """The answer to one question.

        Raises:
            Exception: whatever the call raised, for all who shared it.
        """
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        try:
            while batch := list(self._waiting[: self._limit]):
                del self._waiting[: self._limit]
                await self._one_call([(question, answer) for question, answer in batch if not answer.done()])
        finally:
            self._task = None

    async def _one_call(self, batch: list[tuple[Q, asyncio.Future[A]]]) -> None:
        if not batch:
            return
        try:
            answers = await self._call([question for question, _ in batch])
            assert len(answers) == len(batch)
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
