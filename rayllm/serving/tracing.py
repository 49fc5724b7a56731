"""One OpenTelemetry span for each request that goes to engines, sent to a collector over OTLP.

Attributes follow the semantic conventions for generative AI; where these have none, they are called as vLLM calls them.
Times are seconds, those in an engine as the engine itself took them; of several choices the longest.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rayllm import __version__
from rayllm.api.call import Receive, Scope, Send
from rayllm.api.service import Stream
from rayllm.config.serve import TraceSettings
from rayllm.messages.engine import Add
from rayllm.messages.ingress import RequestOutput, RequestTimes

App = Callable[[Scope, Receive, Send], Awaitable[None]]
Submit = Callable[[list[Add]], Awaitable[Sequence[Stream]]]

FLUSH_S = 2.0
"""How long a flush waits for the collector."""


class Tracing:
    """Makes spans and sends them, from a thread of its own."""

    def __init__(self, settings: TraceSettings, model_name: str) -> None:
        """Usable only after `start`."""
        self._settings, self._model_name = settings, model_name
        self._current: ContextVar[_HttpRequest | None] = ContextVar("rayllm-request", default=None)

    def start(self) -> None:
        """Begin to send. To be called once Ray is up: the thread would not survive the forks of its start."""
        resource = Resource({"service.name": "rayllm"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(self._settings)))
        self._tracer = self._provider.get_tracer("rayllm", __version__)

    def middleware(self, app: App) -> App:
        """An application that passes requests on, and ends their spans when they are answered."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            request = _HttpRequest(scope)
            before = self._current.set(request)
            try:
                await app(scope, receive, send)
            finally:
                self._current.reset(before)
                request.end()

        return traced

    async def submit(self, adds: list[Add], submit: Submit) -> list[Stream]:
        """Submit the choices of the HTTP request under way, and follow them in its span.

        Raises:
            RequestError, Overloaded: as `submit` does; the span has the error.
        """
        request = self._current.get()
        if request is None:
            return [*await submit(adds)]
        traced = request.begin(self._tracer, self._settings, self._model_name, adds)
        try:
            streams = await submit(adds)
        except Exception as error:
            traced.fail(error)
            raise
        return [_Followed(stream, traced, index) for index, stream in enumerate(streams)]

    async def flush(self) -> None:
        """Send what waits, unless that takes too long. To be called before the process ends."""
        thread = threading.Thread(target=self._provider.force_flush, name="rllm-traces-flush", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, FLUSH_S)


def _exporter(settings: TraceSettings) -> SpanExporter:
    if settings.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=settings.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=settings.endpoint)


class _HttpRequest:
    """An HTTP request; it has a span once it goes to engines."""

    def __init__(self, scope: Scope) -> None:
        self._scope, self._began = scope, time.time_ns()
        self._traced: _TracedRequest | None = None

    def begin(self, tracer: Tracer, settings: TraceSettings, model_name: str, adds: list[Add]) -> "_TracedRequest":
        """Begin its span, at the time at which it came, as a part of the client's trace if it has one."""
        operation = "chat" if self._scope["path"].endswith("/chat/completions") else "text_completion"
        span = tracer.start_span(
            f"{operation} {model_name}",
            _client_context(self._scope),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, **_asked(model_name, adds)},
            start_time=self._began,
        )
        self._traced = _TracedRequest(span, settings, self._began, len(adds))
        return self._traced

    def end(self) -> None:
        """The answer is out, or the client has left."""
        if self._traced is not None:
            self._traced.end()


class _TracedRequest:
    """A request that engines work on."""

    def __init__(self, span: Span, settings: TraceSettings, began: int, choices: int) -> None:
        self._span, self._settings, self._began = span, settings, began
        self._first = 0
        self._tokens = 0
        self._cached = 0
        self._reasons = [""] * choices
        self._times: dict[int, RequestTimes] = {}

    def take(self, choice: int, output: RequestOutput) -> None:
        """A choice got an output."""
        if not self._first:
            self._first = time.time_ns()
        self._tokens += len(output.token_ids)
        if output.cached_tokens is not None:
            self._cached = max(self._cached, output.cached_tokens)
        if output.times is not None:
            self._times[choice] = output.times
        if output.finish_reason is not None:
            self._reasons[choice] = output.finish_reason
            if output.finish_reason == "error":
                self._fail_as("error", output.error or "the engine ended the request")

    def aborted(self, choice: int, reason: str) -> None:
        """A choice was ended from here: by a stop string, or since nobody waits for it."""
        if not self._reasons[choice]:
            self._reasons[choice] = reason

    def fail(self, error: Exception) -> None:
        """The request cannot be answered."""
        self._fail_as(type(error).__name__, str(error))

    def end(self) -> None:
        """End the span, with all that came together."""
        span, now = self._span, time.time_ns()
        span.set_attribute("gen_ai.usage.output_tokens", self._tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", self._cached)
        span.set_attribute("gen_ai.response.finish_reasons", [reason for reason in self._reasons if reason])
        span.set_attribute("gen_ai.latency.e2e", (now - self._began) / 1e9)
        if self._first:
            span.set_attribute("gen_ai.latency.time_to_first_token", (self._first - self._began) / 1e9)
        if self._times:
            for name, value in self._engine_times(list(self._times.values())).items():
                span.set_attribute(f"gen_ai.latency.{name}", value)
        span.end(now)

    def _engine_times(self, times: Sequence[RequestTimes]) -> dict[str, float]:
        found = {"time_in_queue": max(one.queued for one in times)}
        if self._settings.model or self._settings.worker:
            found["time_in_model_prefill"] = max(one.prefill for one in times)
            found["time_in_model_decode"] = max(one.decode for one in times)
        if self._settings.model:
            found["time_in_model_forward"] = max(one.model for one in times)
        if self._settings.worker:
            found["time_in_model_execute"] = max(one.worker for one in times)
        return found

    def _fail_as(self, kind: str, message: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, message))


class _Followed:
    """A choice's stream, whose outputs are noted on their way."""

    def __init__(self, stream: Stream, request: _TracedRequest, choice: int) -> None:
        self._stream, self._request, self._choice = stream, request, choice
        self._outputs = aiter(stream)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            output = await anext(self._outputs)
        except StopAsyncIteration:
            raise
        except Exception as error:
            self._request.fail(error)
            raise
        self._request.take(self._choice, output)
        return output

    def abort(self, reason: str = "abort") -> None:
        """See `Stream.abort`."""
        self._request.aborted(self._choice, reason)
        self._stream.abort(reason)


def _client_context(scope: Scope) -> Context:
    """The client's trace, as its headers `traceparent` and `tracestate` tell; a new one without them."""
    headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
    return TraceContextTextMapPropagator().extract(headers, Context())


def _asked(model_name: str, adds: list[Add]) -> dict[str, Any]:
    """What a request asks for."""
    first = adds[0]
    prompts = {id(add.prompt_token_ids): len(add.prompt_token_ids) for add in adds}
    return {
        "gen_ai.provider.name": "rayllm",
        "gen_ai.request.id": first.external_id,
        "gen_ai.response.id": first.external_id,
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.max_tokens": first.sampling.max_tokens or 0,
        "gen_ai.request.temperature": first.sampling.temperature,
        "gen_ai.request.top_p": first.sampling.top_p,
        "gen_ai.request.choice.count": len(adds) // len(prompts),
        "gen_ai.usage.input_tokens": sum(prompts.values()),
    }
