"""The log lines of engine statistics."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from rayllm.messages.ingress import EngineStats, Load

log = logging.getLogger(__name__)


class Engines(Protocol):
    """What the lines are about: a fleet."""

    placed: int

    def load(self) -> int:
        """Requests that run or wait in all engines."""
        ...

    async def stats(self) -> dict[str, EngineStats]:
        """The metrics of every engine, by its id."""
        ...


async def log_statistics(engines: Engines, every_s: float, aggregate: bool) -> None:
    """Log after each interval with something to do: a line for each engine, or one for all if `aggregate` is set."""
    before: dict[str, EngineStats] = {}
    placed = 0
    while True:
        await asyncio.sleep(every_s)
        if engines.load() == 0 and engines.placed == placed:
            continue
        placed, stats = engines.placed, await engines.stats()
        if aggregate:
            known = [before.get(engine, EngineStats()) for engine in stats]
            log.info("%d engines: %s", len(stats), _line(combined(known), combined(stats.values()), every_s))
        else:
            for engine, now in stats.items():
                line = _line(before.get(engine, EngineStats()), now, every_s)
                log.info("engine %d (%s): %s", now.rank, engine, line)
        before = stats


def combined(stats: Iterable[EngineStats]) -> EngineStats:
    """What a line tells of several engines, as if they were one."""
    every = list(stats)
    blocks = sum(one.blocks_total for one in every)
    used = sum(one.load.kv_usage * one.blocks_total for one in every)
    return EngineStats(
        load=Load(
            running=sum(one.load.running for one in every),
            waiting=sum(one.load.waiting for one in every),
            kv_usage=used / max(1, blocks),
        ),
        prompt_tokens=sum(one.prompt_tokens for one in every),
        generation_tokens=sum(one.generation_tokens for one in every),
        prefix_queries=sum(one.prefix_queries for one in every),
        prefix_hits=sum(one.prefix_hits for one in every),
    )


def _line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    output = (now.generation_tokens - before.generation_tokens) / seconds
    hits = 100 * now.prefix_hits / max(1, now.prefix_queries)
    return (
        f"{prompt:.1f} prompt and {output:.1f} output tokens/s; {now.load.running} running, "
        f"{now.load.waiting} waiting; "
        f"KV cache {100 * now.load.kv_usage:.1f}%, prefix hits {hits:.1f}%"
    )
