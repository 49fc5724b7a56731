"""How long KV blocks keep their content, lie unused before they lose it, and wait for their next use: of a sample."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from rayllm.engine.metrics import Distribution

RESIDENCY_BOUNDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0, 3600.0,
)  # fmt: skip
"""Bucket bounds in seconds."""


@dataclass(slots=True)
class _Life:
    taken: float
    used: float
    """When it was taken or last shared."""
    let_go: float | None = None
    """Since when no request holds it."""


class Residency:
    """Measures a share of the blocks, each from when it is taken to when its content is given up.

    Meets `rayllm.kv.blocks.BlockWatch`. A block that was never findable is given up as soon as it is let go, and
    counts as one that lay unused for no time.
    """

    def __init__(
        self, share: float, clock: Callable[[], float] = time.monotonic, draw: Callable[[], float] = random.random
    ) -> None:
        """`share` of the blocks, in (0, 1]; `draw` gives numbers in [0, 1)."""
        self._share, self._clock, self._draw = share, clock, draw
        self._lifetime, self._idle, self._gap = (Distribution(RESIDENCY_BOUNDS) for _ in range(3))
        self.histograms = {
            "kv_block_lifetime_seconds": self._lifetime,
            "kv_block_idle_before_evict_seconds": self._idle,
            "kv_block_reuse_gap_seconds": self._gap,
        }
        """By metric name without prefix."""
        self._lives: dict[int, _Life] = {}

    def taken(self, blocks: list[int]) -> None:
        """Begin the life of those that fall into the sample."""
        now = self._clock()
        for block in blocks:
            if self._draw() < self._share:
                self._lives[block] = _Life(now, now)

    def shared(self, blocks: list[int]) -> None:
        """One more request uses the content of these."""
        now = self._clock()
        for block in blocks:
            if life := self._lives.get(block):
                self._gap.observe(now - life.used)
                life.used, life.let_go = now, None

    def let_go(self, block: int) -> None:
        """No request holds the block any more."""
        if life := self._lives.get(block):
            life.let_go = self._clock()

    def ended(self, block: int) -> None:
        """The content of the block is given up."""
        if life := self._lives.pop(block, None):
            now = self._clock()
            self._lifetime.observe(now - life.taken)
            self._idle.observe(0.0 if life.let_go is None else now - life.let_go)
