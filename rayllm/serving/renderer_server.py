"""The renderer deployment: long prompts become token ids away from the ingress's event loop."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rayllm.config.serve import FrontendSettings, LogSettings
from rayllm.errors import RequestError
from rayllm.logs import configure_logging

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RenderText:
    """A text to be tokenized."""

    text: str
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class RenderChat:
    """A conversation to be rendered; see `Renderer.render_chat`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """What a request error was, where others of the same call went well."""

    message: str
    param: str | None


Job = RenderText | RenderChat
Rendered = list[int] | Refused


class RendererServer:
    """One replica of the renderer deployment."""

    def __init__(self, frontend: FrontendSettings, logs: LogSettings) -> None:
        from rayllm.render.renderer import Renderer

        configure_logging(logs)
        self._renderer = Renderer.load(frontend)
        self._workers = ThreadPoolExecutor(frontend.render_workers, thread_name_prefix="rllm-render")

    async def render(self, jobs: Sequence[Job]) -> list[Rendered]:
        """Token ids for each job, or why there are none."""
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(self._workers, self._render, job) for job in jobs))

    def _render(self, job: Job) -> Rendered:
        try:
            match job:
                case RenderText():
                    return self._renderer.tokenize(job.text, job.add_special_tokens)
                case RenderChat():
                    return self._renderer.render_chat(job.messages, job.tools, job.options)
        except RequestError as error:
            return Refused(error.message, error.param)
