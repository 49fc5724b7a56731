"""A service without engines, for tests of the HTTP app: it answers with scripted tokens."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayllm.errors import RayLLMError
from rayllm.messages.engine import Add, Command
from rayllm.messages.ingress import FinishReason, RequestOutput, TokenLogprobs
from rayllm.render.renderer import Renderer


@dataclass(frozen=True, slots=True)
class Script:
    """How a choice goes on: the tokens of each output, then its end."""

    steps: Sequence[Sequence[int]]
    finish_reason: FinishReason = "length"
    stop_token_id: int | None = None
    delay: float = 0.0
    """Seconds before each output."""
    hang: bool = False
    """Never end after the last step."""
    failure: RayLLMError | None = None
    """Raised after the last step, in place of an end."""


class FakeStream:
    """A stream that follows a script; it records how it was aborted."""

    def __init__(self, add: Add, script: Script) -> None:
        self.add, self.script = add, script
        self.aborted: str | None = None
        self.taken = 0
        """Outputs that were read."""

    def abort(self, reason: str = "abort") -> None:
        """Record the reason of the first abort."""
        self.aborted = self.aborted or reason

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """The scripted outputs, cut at the request's `max_tokens`."""
        script, left = self.script, self.add.sampling.max_tokens or 0
        steps = [list(step) for step in script.steps] or [[]]
        for i, step in enumerate(steps):
            await asyncio.sleep(script.delay)
            ids, left = step[:left], left - len(step)
            last = left <= 0 or (i == len(steps) - 1 and not script.hang and script.failure is None)
            self.taken += 1
            yield self._output(ids, i == 0, last, cut=left < 0 or len(ids) < len(step))
            if last:
                return
        if script.failure is not None:
            raise script.failure
        await asyncio.Event().wait()

    def _output(self, ids: list[int], first: bool, last: bool, cut: bool) -> RequestOutput:
        sampling, script = self.add.sampling, self.script
        reason: FinishReason | None = None
        if last:
            reason = "length" if cut else script.finish_reason
        wanted = sampling.prompt_logprobs is not None and first
        return RequestOutput(
            request_id=0,
            token_ids=ids,
            finish_reason=reason,
            stop_token_id=script.stop_token_id if reason == "stop" else None,
            logprobs=None if sampling.logprobs is None else [_logprobs(i, sampling.logprobs) for i in ids],
            prompt_logprobs=_of_prompt(self.add) if wanted else None,
            cached_tokens=0 if first else None,
            error="the script says so" if reason == "error" else None,
        )


def _of_prompt(add: Add) -> list[TokenLogprobs | None]:
    return [None, *(_logprobs(i, add.sampling.prompt_logprobs or 0) for i in add.prompt_token_ids[1:])]


def _logprobs(token_id: int, alternatives: int) -> TokenLogprobs:
    """Made-up values: the token itself is the likeliest, the ids after it follow."""
    top = [token_id + i for i in range(alternatives)]
    return TokenLogprobs(token_id, -0.5, 1, top, [-0.5 - i for i in range(alternatives)])


@dataclass
class FakeService:
    """Meets `Service` with a renderer and scripts, used in turn, the last one for ever."""

    renderer: Renderer
    scripts: list[Script] = field(default_factory=lambda: [Script([[65], [66], [67]])])
    refusal: RayLLMError | None = None
    """Raised by `submit`."""
    admission: float = 0.0
    """Seconds that `submit` takes."""
    unhealthy: str | None = None
    streams: list[FakeStream] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    """All that was asked for, in order."""
    answer: Any = None
    """To each command."""
    scales: list[tuple[int, float]] = field(default_factory=list)
    """Numbers of engines that were asked for, with the time to do it in."""
    scale_failure: Exception | None = None
    cancelled: int = 0
    """Calls of `submit` that were cancelled."""

    @property
    def adds(self) -> list[Add]:
        """All that was submitted."""
        return [stream.add for stream in self.streams]

    async def submit(self, adds: list[Add]) -> list[FakeStream]:
        """Begin a scripted stream for each."""
        if self.refusal is not None:
            raise self.refusal
        try:
            await asyncio.sleep(self.admission)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        streams = [FakeStream(add, self._script()) for add in adds]
        self.streams += streams
        return streams

    async def scale(self, engines: int, timeout_s: float) -> None:
        """Note it, and do as told."""
        if self.scale_failure is not None:
            raise self.scale_failure
        self.scales.append((engines, timeout_s))

    async def scaling(self) -> bool:
        """While scaling fails for being under way."""
        return self.scale_failure is not None

    async def render_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> list[int]:
        """Rendered in this process."""
        return self.renderer.render_chat(messages, tools, options)

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenized in this process."""
        return self.renderer.tokenize(text, add_special_tokens)

    def healthy(self) -> str | None:
        """As set."""
        return self.unhealthy

    async def load(self) -> int:
        """See `running`."""
        return self.running()

    def running(self) -> int:
        """Streams that have not ended, as far as the script knows."""
        return sum(stream.aborted is None for stream in self.streams)

    async def metrics(self) -> bytes:
        """One metric."""
        return b"fake_requests_total %d\n" % len(self.streams)

    async def command(self, command: Command) -> list[Any]:
        """Noted, and answered as set."""
        self.commands.append(command)
        return [self.answer]

    def _script(self) -> Script:
        return self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
