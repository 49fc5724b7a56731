"""Ranks that something else started, such as torchrun: each process has its own engine, and all do the same."""

import os
from collections.abc import Mapping
from concurrent.futures import Future

import msgspec
import torch
import torch.distributed as dist

from rayllm.config.engine import EngineConfig
from rayllm.errors import ConfigError
from rayllm.executor.uni import UniExecutor
from rayllm.messages.worker import StepPlan, StepResult
from rayllm.parallel.meeting import join_launched

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ExternalExecutor(UniExecutor):
    """One rank in this process. Every process must be given the same requests in the same order.

    Each plans the same steps, takes part in their collectives, and gets the results of the rank that chooses tokens.
    """

    def __init__(self, config: EngineConfig, environment: Mapping[str, str] = os.environ) -> None:
        """Join the other ranks and load this one's share of the model.

        Raises:
            ConfigError: the environment is not that of a launcher of as many processes.
        """
        option, settings = "--distributed-executor-backend", config.parallel
        if missing := [name for name in NEEDED if name not in environment]:
            reason = f"external_launcher needs the environment of a launcher, which lacks {', '.join(missing)}"
            raise ConfigError(option, reason, "run it by torchrun, or choose mp")
        if settings.stages > 1:
            raise ConfigError(option, "external_launcher runs one pipeline stage", "drop --pipeline-parallel-size")
        if (size := int(environment["WORLD_SIZE"])) != settings.size:
            reason = f"the launcher started {size} processes, and the sizes ask for {settings.size}"
            raise ConfigError(option, reason, "make them equal")
        super().__init__(config, lambda: join_launched(settings))

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """Queue a step for the worker's thread."""
        return self._thread.submit(self._execute, plan)

    def available_kv_bytes(self) -> int:
        """Bytes that the KV cache may take, on the rank that has least."""
        own = torch.tensor([self._live.available_kv_bytes()])
        dist.all_reduce(own, dist.ReduceOp.MIN)
        return int(own)

    def _execute(self, plan: StepPlan) -> StepResult:
        result = self._live.execute(plan)
        leads = dist.get_rank() == 0
        told = msgspec.msgpack.encode(result) if leads else b""
        length = torch.tensor([len(told)])
        dist.broadcast(length, 0)
        body = (
            torch.frombuffer(bytearray(told), dtype=torch.uint8)
            if leads
            else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(body, 0)
        return msgspec.msgpack.decode(body.numpy().tobytes(), type=StepResult)
