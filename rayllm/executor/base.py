"""How a step reaches the workers: one interface, and one place that chooses among its forms."""

from concurrent.futures import Future
from typing import Any, Protocol

from rayllm.config.engine import EngineConfig
from rayllm.messages.structured import StructuredOutputs
from rayllm.messages.worker import StepPlan, StepResult


class Executor(Protocol):
    """Owns the workers of one engine. Steps are carried out in the order in which they were submitted."""

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers of a group, on the worker that needs most."""
        ...

    def available_kv_bytes(self) -> int:
        """Bytes that the KV cache may take, on the worker that has least."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache. Called once, before the first step."""
        ...

    def logits_processor_names(self) -> frozenset[str]:
        """Names under which requests may give arguments to logits processors."""
        ...

    def prepare_grammar(self, asked: StructuredOutputs) -> "Future[Any]":
        """Compile the grammar of a form, away from the steps. Its result is to be held while requests follow it.

        The future raises `RequestError` where the grammar is wrong.

        Raises:
            RequestError: its options cannot be had.
            Overloaded: too many are being compiled.
        """
        ...

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker, after the steps that were submitted; one result a worker.

        Raises:
            AttributeError: workers have no such method.
            Exception: what the method raises.
        """
        ...

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """Send a step; does not wait. The future raises if a worker failed, after which no step is carried out."""
        ...

    def profile(self, begin: bool) -> None:
        """Begin profiles of the workers, or end them and write their traces, after the steps that were submitted.

        Blocks until that is done; only where the config has a profiler.
        """
        ...

    def shutdown(self) -> None:
        """End the workers. Idempotent."""
        ...


def build_executor(config: EngineConfig) -> Executor:
    """Make the executor that the config asks for, with its workers' models loaded.

    Raises:
        ConfigError: workers cannot be had, or an option cannot be honoured there.
        ModelError: the model's files cannot be used.
    """
    # Each loads torch or Ray, which an engine under test may do without.
    settings = config.parallel
    if settings.executor == "external_launcher":
        from rayllm.executor.external import ExternalExecutor

        return ExternalExecutor(config)
    if settings.executor == "uni" or (settings.executor is None and settings.size == 1):
        from rayllm.executor.uni import UniExecutor

        return UniExecutor(config)
    from rayllm.executor.ranked import RankedExecutor

    if settings.executor == "ray":
        from rayllm.executor.ray import RayLauncher

        return RankedExecutor(config, RayLauncher(config))
    from rayllm.executor.mp import launcher

    return RankedExecutor(config, launcher(config))
