"""What an engine sends to an ingress over their session. A frame is a list of these."""

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and of its likeliest alternatives, in descending order.

    `rank` is 1 for the likeliest token. Values are natural logarithms of the model's own distribution, before
    penalties and temperature, unless --logprobs-mode says otherwise.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    top_ranks: list[int] = []
    """Of the alternatives, where these are not the likeliest; empty: 1, 2 and so on."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy an engine is, sent along with every step."""

    running: int = 0
    waiting: int = 0
    tokens_waiting: int = 0
    """Prompt tokens not yet computed, of all its requests."""
    kv_usage: float = 0.0
    """Share of the KV blocks that requests hold, 0 to 1."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `Hello`."""

    engine_id: str


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The request is queued; outputs follow."""

    request_id: int


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The request was not taken; nothing more follows.

    `kind` `request` is the request's own fault (400), `overloaded` means that the queue is full (503).
    """

    request_id: int
    kind: Literal["request", "overloaded"]
    message: str
    param: str | None = None
    code: str | None = None
    """The error's code, such as `context_length_exceeded`."""


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """How a request's time in its engine was spent, in seconds, as far as it has come."""

    queued: float
    """Until its first step."""
    prefill: float
    """From there to its first token."""
    decode: float
    """From its first token on."""
    model: float
    """While it ran: in the model, for all requests of its steps."""
    worker: float
    """The same with all else that a step is: its preparation, logits and sampling."""


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step produced for one request."""

    request_id: int
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The end or stop token that ended it. An end token is part of `token_ids`."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Sent once, with the first output: one for each prompt token, None for the first."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; sent with the first output."""
    error: str | None = None
    """Why it ended, where the reason is `error`."""
    times: RequestTimes | None = None
    """Sent with the first and the last output."""


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one request, one after the other, as one."""
    logprobs = [*(first.logprobs or []), *(second.logprobs or [])]
    return RequestOutput(
        request_id=first.request_id,
        token_ids=[*first.token_ids, *second.token_ids],
        finish_reason=second.finish_reason,
        stop_token_id=second.stop_token_id,
        logprobs=logprobs if first.logprobs is not None or second.logprobs is not None else None,
        prompt_logprobs=first.prompt_logprobs if first.prompt_logprobs is not None else second.prompt_logprobs,
        cached_tokens=first.cached_tokens if first.cached_tokens is not None else second.cached_tokens,
        error=second.error,
        times=second.times or first.times,
    )


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """All that one engine step has for this ingress."""

    outputs: list[RequestOutput]
    load: Load


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answer to `Ping`, with the load, so that an idle session knows it too.

    `stalled_s` is how long the current step has been running, in seconds; 0 when the engine is idle.
    """

    number: int
    load: Load
    stalled_s: float = 0.0


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """A Prometheus histogram: upper bounds, counts per bucket (not cumulative, one more than bounds), sum."""

    bounds: list[float]
    counts: list[int]
    sum: float


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's metrics at one moment. Counters only rise while the engine lives."""

    rank: int = 0
    """Of the engine, among those of its data-parallel group."""
    load: Load = Load()
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Of these, tokens that were found."""
    cascade_steps: int = 0
    """Steps that computed attention over a prefix once for all requests that share it."""
    finished: dict[str, int] = {}
    """Ended requests by reason: stop, length, abort, error."""
    rejected: int = 0
    """Requests that were refused because too many ran or waited."""
    blocks_total: int = 0
    blocks_free: int = 0
    """Free blocks, cached ones included."""
    histograms: dict[str, Histogram] = {}
    """By metric name without prefix, such as `time_to_first_token_seconds`."""
    estimates: dict[str, float] = {}
    """Counters of estimated work by metric name without prefix, where these are asked for."""


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Answer to `StatsRequest`."""

    number: int
    engine_id: str
    stats: EngineStats


class Answer(msgspec.Struct, frozen=True, tag="answer", omit_defaults=True):
    """Answer to `Ask`."""

    number: int
    value: Any = None
    error: str = ""
    """Why it could not be done."""
    refused: bool = False
    """Whether that was the command's own fault."""


class Dead(msgspec.Struct, frozen=True, tag="dead"):
    """The engine failed; the session ends."""

    reason: str


ToIngress = Welcome | Admitted | Rejected | StepOutputs | Pong | Stats | Answer | Dead
