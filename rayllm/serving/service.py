"""The service behind the HTTP app, in the ingress: requests go to engines over sessions, prompts are rendered."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.serve.handle import DeploymentHandle

from rayllm.api.service import Stream
from rayllm.errors import Overloaded, RequestError
from rayllm.messages.engine import Add
from rayllm.messages.ingress import EngineStats
from rayllm.render.renderer import Renderer
from rayllm.serving.batcher import Batcher
from rayllm.serving.directory import ServeDirectory, machine_address
from rayllm.serving.fleet import Fleet
from rayllm.serving.metrics import prometheus_text
from rayllm.serving.renderer_server import Job, Refused, RenderChat, Rendered, RenderText
from rayllm.serving.router import RouterClient
from rayllm.serving.wire import SessionLimits

if TYPE_CHECKING:
    from rayllm.serving.tracing import Tracing

log = logging.getLogger(__name__)

SMALL_PROMPT = 20_000
"""Characters up to which rendering here (under 10 ms) is cheaper than a handle call (5 ms of CPU, and its wait)."""
RENDER_S = 30.0
STATS_EVERY_S = 10.0


class ServiceImpl:
    """Meets `rayllm.api.service.Service`. Belongs to the event loop in which `attach` was called."""

    def __init__(
        self,
        renderer: Renderer,
        model_name: str,
        ingress_id: str,
        limits: SessionLimits,
        shown_metrics: Mapping[str, str] = {},
        tracing: "Tracing | None" = None,
    ) -> None:
        """Usable only after `attach`; until then it is unhealthy and has no engines."""
        self._renderer = renderer
        self._model_name = model_name
        self._ingress_id = ingress_id
        self._limits = limits
        self._shown_metrics = shown_metrics
        self._tracing = tracing
        self._fleet: Fleet | None = None
        self._attached = asyncio.Event()
        self._rendering: Batcher[Job, Rendered] | None = None
        self._logging: asyncio.Task[None] | None = None

    def attach(
        self,
        engines: DeploymentHandle[Any],
        router: DeploymentHandle[Any] | None = None,
        renderer: DeploymentHandle[Any] | None = None,
        log_stats: bool = False,
    ) -> None:
        """Begin to use the deployments. Without a router or renderer their work is done here."""
        choose = RouterClient(router).choose if router is not None else None
        directory = ServeDirectory(engines, machine_address())
        self._fleet = Fleet(directory, self._ingress_id, self._limits, choose)
        self._fleet.start()
        if renderer is not None:
            self._rendering = Batcher(_render_call(renderer))
        if log_stats:
            self._logging = asyncio.get_running_loop().create_task(self._log_stats(self._fleet))
        if self._tracing is not None:
            self._tracing.start()
        self._attached.set()

    async def close(self) -> None:
        """Leave the engines; what runs is aborted there."""
        if self._logging is not None:
            self._logging.cancel()
        if self._fleet is not None:
            await self._fleet.close()
        if self._tracing is not None and self._attached.is_set():
            await self._tracing.flush()

    async def wait_healthy(self) -> None:
        """Wait until an engine serves."""
        await self._attached.wait()
        while self.healthy() is not None:
            await asyncio.sleep(0.05)

    # -- Service

    async def submit(self, adds: list[Add]) -> list[Stream]:
        """See `Service.submit`."""
        fleet = await self._engines()
        if self._tracing is not None:
            return await self._tracing.submit(adds, fleet.submit)
        return [*await fleet.submit(adds)]

    async def render_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> list[int]:
        """See `Service.render_chat`."""
        if _characters(messages) <= SMALL_PROMPT:
            return self._renderer.render_chat(messages, tools, options)
        job = RenderChat(messages, tools, options)
        if (ids := await self._elsewhere(job)) is not None:
            return ids
        return await asyncio.to_thread(self._renderer.render_chat, messages, tools, options)

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """See `Service.tokenize`."""
        if len(text) <= SMALL_PROMPT:
            return self._renderer.tokenize(text, add_special_tokens)
        if (ids := await self._elsewhere(RenderText(text, add_special_tokens))) is not None:
            return ids
        return await asyncio.to_thread(self._renderer.tokenize, text, add_special_tokens)

    def healthy(self) -> str | None:
        """See `Service.healthy`."""
        return self._fleet.healthy() if self._fleet is not None else "the engines are starting"

    def load(self) -> int:
        """See `Service.load`."""
        return self._fleet.load() if self._fleet is not None else 0

    async def metrics(self) -> bytes:
        """See `Service.metrics`."""
        stats = await self._fleet.stats() if self._fleet is not None else {}
        return prometheus_text(stats, self._model_name, self._shown_metrics)

    async def profile(self, begin: bool) -> None:
        """See `Service.profile`."""
        await (await self._engines()).profile(begin)

    # -- within

    async def _engines(self) -> Fleet:
        if self._fleet is None:
            try:
                async with asyncio.timeout(self._limits.admit_wait_s):
                    await self._attached.wait()
            except TimeoutError:
                raise Overloaded("the engines are starting", retry_after=5.0) from None
            assert self._fleet is not None
        return self._fleet

    async def _elsewhere(self, job: Job) -> list[int] | None:
        """Render in the renderer deployment; None where it is not to be had."""
        if self._rendering is None:
            return None
        try:
            async with asyncio.timeout(RENDER_S):
                rendered = await self._rendering.ask(job)
        except Exception as error:
            log.info("rendering here, since the renderer failed: %r", error)
            return None
        if isinstance(rendered, Refused):
            raise RequestError(rendered.message, rendered.param)
        return rendered

    async def _log_stats(self, fleet: Fleet) -> None:
        """Log a line for each engine every ten seconds in which there was something to do."""
        before: dict[str, EngineStats] = {}
        placed = 0
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            if fleet.load() == 0 and fleet.placed == placed:
                continue
            placed, stats = fleet.placed, await fleet.stats()
            for engine, now in stats.items():
                log.info("engine %s: %s", engine, _stats_line(before.get(engine, EngineStats()), now))
            before = stats


def _stats_line(before: EngineStats, now: EngineStats) -> str:
    prompt = (now.prompt_tokens - before.prompt_tokens) / STATS_EVERY_S
    output = (now.generation_tokens - before.generation_tokens) / STATS_EVERY_S
    hits = 100 * now.prefix_hits / max(1, now.prefix_queries)
    return (
        f"{prompt:.1f} prompt and {output:.1f} output tokens/s; {now.load.running} running, "
        f"{now.load.waiting} waiting; "
        f"KV cache {100 * now.load.kv_usage:.1f}%, prefix hits {hits:.1f}%"
    )


def _render_call(renderer: DeploymentHandle[Any]) -> Any:
    async def call(jobs: Sequence[Job]) -> Sequence[Rendered]:
        response = renderer.render.remote(list(jobs))
        try:
            rendered: Sequence[Rendered] = await response
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                response.cancel()  # type: ignore[no-untyped-call]
            raise
        return rendered

    return call


def _characters(messages: list[dict[str, Any]]) -> int:
    """About how long a conversation is; only texts count."""
    total = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(len(part.get("text") or "") for part in content if isinstance(part, dict))
    return total
