"""One worker in this process, on a thread of its own."""

import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rayllm.config.engine import EngineConfig
from rayllm.errors import ConfigError
from rayllm.messages.structured import StructuredOutputs
from rayllm.messages.worker import StepPlan, StepResult
from rayllm.parallel.meeting import Place
from rayllm.plugins import load_class
from rayllm.worker.worker import Worker

log = logging.getLogger(__name__)
HAND_OVER_S = 0.0005
"""How long a thread may keep the interpreter that another waits for. At Python's own 5 ms the worker, back from the
kernels, would wait for the engine, and the engine for whoever delivers."""


def worker_class(config: EngineConfig) -> type[Worker]:
    """The worker that --worker-cls names, or our own, with the methods of what --worker-extension-cls names.

    Raises:
        ConfigError: one cannot be imported, the first is no subclass of ours, or both have an attribute.
    """
    worker: type[Worker] = Worker
    if config.worker_cls is not None:
        log.info("worker: %s", config.worker_cls)
        worker = load_class("--worker-cls", config.worker_cls, Worker)
    if config.worker_extension_cls is None:
        return worker
    log.info("worker extension: %s", config.worker_extension_cls)
    extension: type = load_class("--worker-extension-cls", config.worker_extension_cls, object)
    for name in dir(extension):
        if not name.startswith("__") and hasattr(worker, name):
            raise ConfigError(
                "--worker-extension-cls", f"{config.worker_extension_cls} has {name}, which workers have", "rename it"
            )
    return type(worker.__name__, (worker, extension), {})


class UniExecutor:
    """Runs the worker on one thread, so that the engine plans while the model computes."""

    def __init__(self, config: EngineConfig, join: Callable[[], Place] = Place) -> None:
        """`join` gives the worker's place among others."""
        sys.setswitchinterval(min(sys.getswitchinterval(), HAND_OVER_S))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rllm-worker")
        try:
            # Built on the thread that will use it: thread counts of products are a thread's own setting.
            self._worker: Worker | None = self._thread.submit(lambda: worker_class(config)(config, join())).result()
        except BaseException:
            self._thread.shutdown()
            raise

    @property
    def _live(self) -> Worker:
        assert self._worker is not None, "used after shutdown"
        return self._worker

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers of a group."""
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

    def prepare_grammar(self, asked: StructuredOutputs) -> "Future[Any]":
        """Compile a grammar on a thread of the worker's store of grammars."""
        return self._live.grammars.prepare(asked)

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of the worker, after the steps that were submitted."""
        return [self._thread.submit(getattr(self._live, method), *args, **kwargs).result()]

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """Queue a step for the worker's thread."""
        return self._thread.submit(self._execute, plan)

    def profile(self, begin: bool) -> None:
        """Begin a profile of the worker, or end it and write its trace."""
        self._thread.submit(self._live.profile, begin).result()

    def shutdown(self) -> None:
        """End the thread after the step under way, and free the model."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._worker is not None:
            self._worker.shutdown()
        self._worker = None

    def _execute(self, plan: StepPlan) -> StepResult:
        result = self._live.execute(plan)
        assert result is not None
        return result
