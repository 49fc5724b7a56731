"""One worker in this process, on a thread of its own."""

import logging
import sys
from concurrent.futures import Future, ThreadPoolExecutor

from rayllm.config.engine import EngineConfig
from rayllm.messages.worker import StepPlan, StepResult
from rayllm.plugins import load_class
from rayllm.worker.worker import Worker

log = logging.getLogger(__name__)
HAND_OVER_S = 0.0005
"""How long a thread may keep the interpreter that another waits for. At Python's own 5 ms the worker, back from the
kernels, would wait for the engine, and the engine for whoever delivers."""


def worker_class(path: str | None) -> type[Worker]:
    """The worker that --worker-cls names as `module:Class`, or our own.

    Raises:
        ConfigError: it cannot be imported, or is no subclass of ours.
    """
    if path is None:
        return Worker
    log.info("worker: %s", path)
    return load_class("--worker-cls", path, Worker)


class UniExecutor:
    """Runs the worker on one thread, so that the engine plans while the model computes."""

    def __init__(self, config: EngineConfig) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), HAND_OVER_S))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rllm-worker")
        try:
            # Built on the thread that will use it: thread counts of products are a thread's own setting.
            self._worker: Worker | None = self._thread.submit(worker_class(config.worker_cls), config).result()
        except BaseException:
            self._thread.shutdown()
            raise

    @property
    def _live(self) -> Worker:
        assert self._worker is not None, "used after shutdown"
        return self._worker

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers."""
        return self._live.kv_bytes_per_block()

    def available_kv_bytes(self) -> int:
        """Bytes that the KV cache may take."""
        return self._live.available_kv_bytes()

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache."""
        self._thread.submit(self._live.allocate, num_blocks).result()

    def logits_processor_names(self) -> frozenset[str]:
        """Names of the loaded logits processors."""
        return self._live.logits_processor_names()

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """Queue a step for the worker's thread."""
        return self._thread.submit(self._live.execute, plan)

    def profile(self, begin: bool) -> None:
        """Begin a profile of the worker, or end it and write its trace."""
        self._thread.submit(self._live.profile, begin).result()

    def shutdown(self) -> None:
        """End the thread after the step under way, and free the model."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker = None
