"""What all endpoints share: the service, its settings, and the steps from a checked request to its choices."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from rayllm.api.beams import beam_search, check_beams
from rayllm.api.call import Call, new_id
from rayllm.api.choice import Choice, Echo
from rayllm.api.parsing import Parsers, Parsing
from rayllm.api.request_log import RequestLog
from rayllm.api.sampling import Sampling, cache_salt
from rayllm.api.service import Service, Stream
from rayllm.api.wire import SamplingFields, Wire
from rayllm.config.serve import FrontendSettings
from rayllm.errors import ConfigError, ModelNotFound, RequestError
from rayllm.messages.embeds import FIELD
from rayllm.messages.engine import Add, Embeds
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.validate import Limits
from rayllm.render.renderer import Renderer

_MOST_CHOICES = 2048
"""Choices of one HTTP request."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request, ready for the engine."""

    token_ids: list[int]
    max_tokens: int
    echo: Echo | None = None
    parsing: Parsing | None = None
    """How the texts that follow it are parsed."""
    embeds: tuple[Embeds, ...] = ()
    """What stands in place of tokens, which are then 0."""

    def shown_ids(self) -> list[int] | None:
        """The tokens for those who ask; None where embeddings stand in place of some."""
        return None if self.embeds else self.token_ids


class Front:
    """The service as the endpoints use it."""

    def __init__(self, service: Service, settings: FrontendSettings, renderer: Renderer) -> None:
        """Check that the defaults of requests are in range.

        Raises:
            ConfigError: one is not, or a parser cannot be loaded.
        """
        self.service, self.settings, self.renderer = service, settings, renderer
        self.limits = Limits(
            vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
            max_logprobs=settings.max_logprobs,
            max_tokens=settings.max_tokens,
            takes_stops=not settings.tokens_only,
        )
        self.sampling = Sampling(settings, self.limits, renderer, random.Random(settings.seed))
        self.parsers = Parsers(settings, renderer.tokenizer)
        self._check_defaults()
        self._log = None if settings.request_log is None else RequestLog(settings.request_log, renderer)
        self.created = int(time.time())
        """When the models came up, in Unix seconds."""

    def _check_defaults(self) -> None:
        """Refuse defaults that every request would then be refused for."""
        try:
            self.sampling.params(SamplingFields(), None, self.settings.max_tokens)
        except RequestError as e:
            cure = "set a sound value in --override-generation-config"
            raise ConfigError("--generation-config", f"a default is out of range: {e.message}", cure) from None

    def check_model(self, request: Wire) -> str:
        """The name by which the answer calls the model: the first, whichever the request gives.

        Raises:
            ModelNotFound: the request names another model.
        """
        names = self.settings.served_model_names
        if request.model is not None and request.model not in names:
            raise model_not_found(request.model, names)
        return names[0]

    def name_call(self, call: Call, request: SamplingFields) -> str:
        """The id of a request, shown to clients and in logs; the request may wish for a part of it."""
        if request.request_id:
            call.id = new_id(request.request_id)
        return call.id

    async def submit(
        self,
        request: SamplingFields,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        external_id: str,
    ) -> list[Choice]:
        """Send a request's choices to the engines: `params.n` for each prompt, numbered prompt by prompt.

        Raises:
            RequestError, Overloaded: it was not admitted.
        """
        if request.echo and self.settings.tokens_only:
            raise RequestError("echo needs text, and this server gives token ids only", "echo")
        if len(prompts) * params.n > _MOST_CHOICES:
            raise RequestError(f"the request asks for more than {_MOST_CHOICES} choices; send several", "n")
        if sum(len(one.saved) for prompt in prompts for one in prompt.embeds) * params.n > self.settings.max_body_bytes:
            raise RequestError("prompt_embeds are too large for so many choices; send several requests", FIELD)
        room = min(prompt.max_tokens for prompt in prompts)
        if params.min_tokens > room:
            message = f"min_tokens is {params.min_tokens}, but the output may have {room} tokens at most"
            raise RequestError(message, "min_tokens")
        priority, salt = self.sampling.priority(request), cache_salt(request)
        now = time.time()
        adds = [
            Add(
                request_id=0,
                prompt_token_ids=prompt.token_ids,
                prompt_embeds=prompt.embeds,
                sampling=msgspec.structs.replace(params, n=1, max_tokens=prompt.max_tokens),
                choice_index=i,
                priority=priority,
                arrival_time=now,
                cache_salt=salt,
                external_id=external_id,
            )
            for prompt in prompts
            for i in range(params.n)
        ]
        if self._log is not None:
            self._log.request(external_id, adds, params.n)
        check_beams(request, params)
        streams = await (self._search(request, adds, params) if request.use_beam_search else self.service.submit(adds))
        choices = []
        for i, (stream, add) in enumerate(zip(streams, adds, strict=True)):
            output_log = self._log.output(external_id, i, bool(request.stream)) if self._log is not None else None
            prompt = prompts[i // params.n]
            speller = self.renderer.speller
            choices.append(Choice(i, stream, add.sampling, speller, prompt.echo, output_log, prompt.parsing))
        return choices

    async def _search(self, request: SamplingFields, adds: Sequence[Add], params: SamplingParams) -> list[Stream]:
        """Search with beams, prompt by prompt."""
        eos = () if params.ignore_eos else self.settings.eos_token_ids
        penalty = 1.0 if request.length_penalty is None else request.length_penalty
        streams: list[Stream] = []
        for start in range(0, len(adds), params.n):
            beams = adds[start : start + params.n]
            streams += await beam_search(
                self.service, beams, {*eos, *params.stop_token_ids}, penalty, self.limits.vocab_size
            )
        return streams


class Counted(Protocol):
    """Counts the tokens of an answer."""

    def now(self) -> dict[str, Any]:
        """The usage so far, as chat completions write it."""
        ...


class Usage:
    """Counts the tokens of a request from its choices."""

    def __init__(self, prompts: Sequence[Prompt], choices: Sequence[Choice], details: bool) -> None:
        """`details` adds how many prompt tokens were cached."""
        self._choices, self._details = choices, details
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._firsts = choices[:: len(choices) // len(prompts)]

    def now(self) -> dict[str, Any]:
        """The usage so far, as the API writes it. The tokens of a prompt count once, whatever `n` is."""
        completion = sum(choice.completion_tokens for choice in self._choices)
        cached = sum(choice.cached_tokens for choice in self._firsts)
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached} if self._details else None,
        }
        if self._choices[0].reasoning_tokens is not None:
            thoughts = sum(choice.reasoning_tokens or 0 for choice in self._choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return usage


def check_stream(request: SamplingFields) -> None:
    """Refuse options that contradict `stream`.

    Raises:
        RequestError: names the field.
    """
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs")


def model_not_found(name: str, names: Sequence[str]) -> ModelNotFound:
    """The error for a model that is not served."""
    return ModelNotFound(f"the model {name[:200]!r} does not exist here; served: {', '.join(names)}", "model")
