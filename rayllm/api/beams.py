"""Beam search: the likeliest of many continuations, by the model's own distribution.

The engine is asked for one token of each beam at a time, and for the likeliest alternatives to it. The prefix cache
makes that cheap, and since beams are requests like all others, so are admission, moves to other engines and aborts.
"""

import asyncio
import heapq
import math
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from itertools import count

from msgspec.structs import replace

from rayllm.api.service import Service, Stream
from rayllm.api.wire import SamplingFields
from rayllm.errors import GenerationFailed, RequestError
from rayllm.messages.engine import Add
from rayllm.messages.ingress import RequestOutput, TokenLogprobs
from rayllm.messages.sampling import SamplingParams

_NEUTRAL = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprob_token_ids": ([],),
    "min_p": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "stop": ([],),
    "temperature": (0, 1),
    "top_k": (0, -1),
    "top_p": (1,),
    "vllm_xargs": ({},),
}
"""Fields that would change the distribution or its reading, and the values of them that do not."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation: its tokens and the sum of their log-probabilities."""

    tokens: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    ended: bool = False

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        return [token.token_id for token in self.tokens]

    def score(self, length_penalty: float, length: int | None = None) -> float:
        """By which beams are ranked; as if it had `length` tokens, if that is given."""
        return float(self.total / max(1, len(self.tokens) if length is None else length) ** length_penalty)


def check_beams(request: SamplingFields, params: SamplingParams) -> None:
    """Refuse what beams cannot honour.

    Raises:
        RequestError: names the field.
    """
    if not request.use_beam_search:
        if request.length_penalty not in (None, 1):
            raise RequestError("length_penalty is for beam search; set use_beam_search", "length_penalty")
        return
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(request, name)) is not None and value not in neutral:
            raise RequestError(f"{name} cannot be used with beam search, which ranks by the model's own values", name)
    if params.thinking is not None:
        raise RequestError(
            "thinking_token_budget cannot be used with beam search, which ranks by the model's own values",
            "thinking_token_budget",
        )
    if params.prompt_logprobs is not None:
        raise RequestError("echo cannot be used with logprobs and beam search", "echo")
    penalty = request.length_penalty
    if penalty is not None and not -10 <= penalty <= 10:
        raise RequestError("length_penalty must be a number from -10 to 10", "length_penalty")


async def beam_search(
    service: Service, adds: Sequence[Add], ends: Collection[int], length_penalty: float, vocab_size: int
) -> list[Stream]:
    """The best continuations of one prompt, as streams that have all of their output.

    There are as many as `adds`, which differ in their choice index alone. `ends` are tokens that end a continuation.

    Raises:
        RequestError, Overloaded: the prompt was not admitted.
        GenerationFailed, ReplicaLost: an engine gave up.
    """
    width, most = len(adds), adds[0].sampling.max_tokens
    assert most is not None
    if most < 1:
        raise RequestError("max_tokens must be at least 1 with beam search", "max_tokens")
    live, done = [Beam()], list[Beam]()
    cached: int | None = None
    for length in range(1, most + 1):
        outputs = await _next(service, adds[0], live, min(2 * width, vocab_size))
        cached = outputs[0].cached_tokens if cached is None else cached
        live, ended = _grown(live, outputs, width, ends if length >= adds[0].sampling.min_tokens else (), ends)
        done = heapq.nlargest(width, [*done, *ended], key=lambda beam: beam.score(length_penalty))
        if not live or (len(done) == width and not _may_improve(live, done, length_penalty, most)):
            live = []
            break
    best = heapq.nlargest(width, [*done, *live], key=lambda beam: beam.score(length_penalty))
    if len(best) < width:
        raise GenerationFailed(f"there are only {len(best)} continuations, fewer than n")
    return [_Found(beam, add.sampling, cached) for beam, add in zip(best, adds, strict=True)]


async def _next(service: Service, add: Add, live: Sequence[Beam], alternatives: int) -> list[RequestOutput]:
    """For each beam an output of one token, with so many alternatives."""
    steps = [
        replace(
            add,
            output_token_ids=beam.ids,
            choice_index=index,
            sampling=replace(
                add.sampling,
                temperature=0.0,
                logprobs=alternatives,
                max_tokens=len(beam.tokens) + 1,
                min_tokens=0,
                ignore_eos=True,
                stop_token_ids=(),
            ),
        )
        for index, beam in enumerate(live)
    ]
    streams = await service.submit(steps)
    try:
        return list(await asyncio.gather(*map(_first, streams)))
    finally:
        for stream in streams:
            stream.abort()


async def _first(stream: Stream) -> RequestOutput:
    async for output in stream:
        if not output.logprobs:
            raise GenerationFailed(output.error or "the server ended this request before it was complete")
        return output
    raise GenerationFailed("the output ended before the request did")


def _grown(
    live: Sequence[Beam], outputs: Sequence[RequestOutput], width: int, ends: Collection[int], barred: Collection[int]
) -> tuple[list[Beam], list[Beam]]:
    """The `width` best beams with one token more, and those as good that ended. `barred` ones of no `ends` drop out."""
    order = count()
    grown: list[tuple[float, int, Beam, TokenLogprobs]] = []
    for beam, output in zip(live, outputs, strict=True):
        assert output.logprobs is not None
        [step] = output.logprobs
        for rank, (id_, logprob) in enumerate(zip(step.top_ids, step.top_logprobs, strict=True), 1):
            if math.isfinite(logprob) and (id_ in ends or id_ not in barred):
                token = TokenLogprobs(id_, logprob, rank, step.top_ids, step.top_logprobs)
                grown.append((-(beam.total + logprob), next(order), beam, token))
    goes_on, ended = list[Beam](), list[Beam]()
    for total, _, beam, chosen in sorted(grown):
        if len(goes_on) == width:
            break
        ends_here = chosen.token_id in ends
        (ended if ends_here else goes_on).append(Beam((*beam.tokens, chosen), -total, ends_here))
    return goes_on, ended


def _may_improve(live: Sequence[Beam], done: Sequence[Beam], length_penalty: float, most: int) -> bool:
    """Whether a beam that goes on might yet score better than the worst that is done: totals only fall."""
    worst = min(beam.score(length_penalty) for beam in done)
    return any(
        max(beam.score(length_penalty, len(beam.tokens) + 1), beam.score(length_penalty, most)) > worst for beam in live
    )


class _Found:
    """The stream of a beam that is complete."""

    def __init__(self, beam: Beam, sampling: SamplingParams, cached: int | None) -> None:
        self._beam, self._sampling, self._cached = beam, sampling, cached

    def abort(self, reason: str = "abort") -> None:
        """Nothing runs any more."""

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """All of it as one output."""
        beam, shown = self._beam, self._sampling.logprobs
        logprobs = None
        if shown is not None:
            logprobs = [
                replace(token, top_ids=token.top_ids[:shown], top_logprobs=token.top_logprobs[:shown])
                for token in beam.tokens
            ]
        yield RequestOutput(
            request_id=0,
            token_ids=beam.ids,
            finish_reason="stop" if beam.ended else "length",
            stop_token_id=beam.tokens[-1].token_id if beam.ended else None,
            logprobs=logprobs,
            cached_tokens=self._cached,
        )
