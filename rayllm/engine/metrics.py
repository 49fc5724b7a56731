"""An engine's counters and latency histograms, kept without locks by the step loop."""

from bisect import bisect_left

from rayllm.messages.ingress import Histogram

LATENCY_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
"""Bucket bounds in seconds."""
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Distribution:
    """Counts of observations by bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def snapshot(self) -> Histogram:
        """The counts as a message."""
        return Histogram(list(self.bounds), list(self.counts), self.sum)


class EngineMetrics:
    """What an engine counts. Times are seconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cascade_steps = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.histograms = {
            "time_to_first_token_seconds": Distribution(LATENCY_BOUNDS),
            "inter_token_latency_seconds": Distribution(LATENCY_BOUNDS),
            "e2e_request_latency_seconds": Distribution(LATENCY_BOUNDS),
            "request_queue_time_seconds": Distribution(LATENCY_BOUNDS),
            "request_prompt_tokens": Distribution(TOKEN_BOUNDS),
            "request_generation_tokens": Distribution(TOKEN_BOUNDS),
        }
