"""A line of the log for each step: what it computed, and how long it took."""

import logging
import time

from rayllm.engine.scheduler import PlannedStep

log = logging.getLogger(__name__)


class IterationLog:
    """Notes steps as they are sent and logs each when it is back, in the same order."""

    def __init__(self) -> None:
        self._sent: list[tuple[int, int, int, int, float]] = []
        self._last_back = 0.0

    def note_sent(self, step: PlannedStep) -> None:
        """To be called right after the step was planned, while its requests are as they were planned."""
        rows, tokens, steps, generated = 0, 0, 0, 0
        for request, count in zip(step.requests, step.plan.counts, strict=True):
            if count > 1 or request.computed - count < request.num_prompt:
                rows, tokens = rows + 1, tokens + count
            else:
                steps, generated = steps + 1, generated + count
        self._sent.append((rows, tokens, steps, generated, time.monotonic()))

    def note_back(self, step: PlannedStep) -> None:
        """To be called when the step's result is there."""
        now = time.monotonic()
        *counts, sent = self._sent.pop(0)
        # A step that was sent early has waited for the one before it.
        took = now - max(sent, self._last_back)
        self._last_back = now
        log.info(
            "iteration %d: %d context requests, %d context tokens, %d generation requests, %d generation tokens, "
            "%.2f ms", step.plan.step, *counts, took * 1000,
        )  # fmt: skip
