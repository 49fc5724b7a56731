"""The service behind the HTTP app, in the ingress: requests go to engines over sessions, prompts are rendered."""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ray.serve.handle import DeploymentHandle

from rayllm.api.service import Stream
from rayllm.errors import Overloaded, RequestError
from rayllm.messages.engine import Add, Command
from rayllm.render.renderer import Renderer
from rayllm.serving.batcher import Batcher
from rayllm.serving.directory import ServeDirectory, machine_address
from rayllm.serving.elastic import Scaler
from rayllm.serving.fleet import Fleet
from rayllm.serving.metrics import prometheus_text
from rayllm.serving.renderer_server import Job, Refused, RenderChat, Rendered, RenderText
from rayllm.serving.router import RouterClient
from rayllm.serving.statistics import log_statistics
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
        render_workers: int = 1,
    ) -> None:
        """Usable only after `attach`; until then it is unhealthy and has no engines."""
        self._renderer = renderer
        self._workers = ThreadPoolExecutor(render_workers, thread_name_prefix="rllm-render")
        self._render_workers = render_workers
        self._model_name = model_name
        self._ingress_id = ingress_id
        self._limits = limits
        self._shown_metrics = shown_metrics
        self._tracing = tracing
        self._fleet: Fleet | None = None
        self._scaler: Scaler | None = None
        self._attached = asyncio.Event()
        self._rendering: Iterator[Batcher[Job, Rendered]] | None = None
        """Used in turn. Each has one call under way, so that there are as many as workers at the other end."""
        self._logging: asyncio.Task[None] | None = None

    def attach(
        self,
        engines: DeploymentHandle[Any],
        router: DeploymentHandle[Any] | None = None,
        renderer: DeploymentHandle[Any] | None = None,
        log_stats: bool = False,
        aggregate_stats: bool = False,
        from_zero: bool = False,
        scaler: Scaler | None = None,
    ) -> None:
        """Begin to use the deployments. Without a router or renderer their work is done here.

        `log_stats` logs statistics of each engine, or with `aggregate_stats` of all of them together. `from_zero` says
        that engines come up only when they are asked for.
        """
        self._scaler = scaler
        choose = RouterClient(router).choose if router is not None else None
        directory = ServeDirectory(engines, machine_address())
        self._fleet = Fleet(directory, self._ingress_id, self._limits, choose, from_zero)
        self._fleet.start()
        if renderer is not None:
            self.render_in(renderer)
        if log_stats:
            logging_ = log_statistics(self._fleet, STATS_EVERY_S, aggregate_stats)
            self._logging = asyncio.get_running_loop().create_task(logging_)
        if self._tracing is not None:
            self._tracing.start()
        self._attached.set()

    def render_in(self, renderer: DeploymentHandle[Any]) -> None:
        """Have long prompts rendered by a renderer deployment."""
        self._rendering = itertools.cycle([Batcher(_render_call(renderer)) for _ in range(self._render_workers)])

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
        render = functools.partial(self._renderer.render_chat, messages, tools, options)
        return await self._rendered(RenderChat(messages, tools, options), _characters(messages), render)

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """See `Service.tokenize`."""
        render = functools.partial(self._renderer.tokenize, text, add_special_tokens)
        return await self._rendered(RenderText(text, add_special_tokens), len(text), render)

    def healthy(self) -> str | None:
        """See `Service.healthy`."""
        return self._fleet.healthy() if self._fleet is not None else "the engines are starting"

    async def load(self) -> int:
        """See `Service.load`."""
        # Asked for: what a session was last told may be two seconds old where other processes have the requests.
        stats = await self._fleet.stats() if self._fleet is not None else {}
        return sum(one.load.running + one.load.waiting for one in stats.values())

    async def metrics(self) -> bytes:
        """See `Service.metrics`."""
        stats = await self._fleet.stats() if self._fleet is not None else {}
        return prometheus_text(stats, self._model_name, self._shown_metrics)

    async def command(self, command: Command) -> list[Any]:
        """See `Service.command`."""
        return await (await self._engines()).command(command)

    async def scale(self, engines: int, timeout_s: float) -> None:
        """See `Service.scale`."""
        await (await self._elastic()).scale(engines, timeout_s)

    async def scaling(self) -> bool:
        """See `Service.scaling`."""
        return await (await self._elastic()).scaling()

    # -- within

    async def _elastic(self) -> Scaler:
        await self._engines()
        assert self._scaler is not None, "the endpoints are there only with a scaler"
        return self._scaler

    async def _engines(self) -> Fleet:
        if self._fleet is None:
            try:
                async with asyncio.timeout(self._limits.admit_wait_s):
                    await self._attached.wait()
            except TimeoutError:
                raise Overloaded("the engines are starting", retry_after=5.0) from None
            assert self._fleet is not None
        return self._fleet

    async def _rendered(self, job: Job, characters: int, render: Callable[[], list[int]]) -> list[int]:
        """Short prompts are rendered by `render` here, others in the renderer deployment if it is to be had."""
        if characters > SMALL_PROMPT and (ids := await self._elsewhere(job)) is not None:
            return ids
        if characters <= SMALL_PROMPT and self._render_workers == 1:
            return render()  # one at a time anyway, and quicker without a change of threads
        return await asyncio.get_running_loop().run_in_executor(self._workers, render)

    async def _elsewhere(self, job: Job) -> list[int] | None:
        """Render in the renderer deployment; None where it is not to be had."""
        if self._rendering is None:
            return None
        try:
            async with asyncio.timeout(RENDER_S):
                rendered = await next(self._rendering).ask(job)
        except Exception as error:
            log.info("rendering here, since the renderer failed: %r", error)
            return None
        if isinstance(rendered, Refused):
            raise RequestError(rendered.message, rendered.param)
        return rendered


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
