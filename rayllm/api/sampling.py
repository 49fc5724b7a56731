"""From the fields of a request to `SamplingParams`, with the model's defaults where a field is left out."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rayllm.api.structured import structured_of
from rayllm.api.wire import SamplingFields
from rayllm.config.serve import FrontendSettings
from rayllm.errors import ContextTooLong, RequestError
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.validate import Limits, check_sampling
from rayllm.render.renderer import Renderer

_SAME_NAME = (
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "prompt_logprobs",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stream_interval",
    "temperature",
    "top_p",
)
"""Fields that pass unchanged; those left out get the model's default, or that of `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Makes sampling parameters for the requests of one service."""

    settings: FrontendSettings
    limits: Limits
    renderer: Renderer
    seeds: random.Random
    """Draws the seeds of requests that bring none."""

    def params(self, request: SamplingFields, logprobs: int | None, max_tokens: int | None) -> SamplingParams:
        """Checked parameters of a request but for the room of its output.

        `logprobs` and `max_tokens` come from fields that differ between endpoints; without `max_tokens`,
        `SamplingParams.max_tokens` is None.

        Raises:
            RequestError: names the field.
        """
        defaults = self.settings.generation_defaults
        values = {name: _given(request, name, defaults) for name in _SAME_NAME}
        top_k = _given(request, "top_k", defaults)
        params = SamplingParams(
            **{name: value for name, value in values.items() if value is not None},
            top_k=0 if top_k in (None, -1) else top_k,
            logit_bias=_logit_bias(request.logit_bias),
            bad_words=tuple(request.bad_words or ()),
            allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
            stop=_stops(request.stop, defaults),
            stop_token_ids=tuple(request.stop_token_ids or defaults.get("stop_token_ids") or ()),
            max_tokens=max_tokens,
            logprobs=0 if request.logprob_token_ids and logprobs is not None else logprobs,
            logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
            structured_outputs=structured_of(request),
            extra_args=dict(request.vllm_xargs) if request.vllm_xargs else None,
        )
        check_sampling(params, self.limits)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self.seeds.getrandbits(63))
        if params.bad_words:
            params = msgspec.structs.replace(params, bad_words_ids=self.renderer.bad_words_ids(params.bad_words))
        return params

    def priority(self, request: SamplingFields) -> int:
        """The priority of a request.

        Raises:
            RequestError: it asks for one, and engines serve in order of arrival.
        """
        priority = request.priority or 0
        if priority and not self.settings.priority_scheduling:
            message = "this server serves in order of arrival; start it with --scheduling-policy priority"
            raise RequestError(message, "priority")
        if not -(2**31) <= priority < 2**31:
            raise RequestError("priority must be a whole number of 32 bits", "priority")
        return priority

    def truncated(self, ids: list[int], request: SamplingFields) -> list[int]:
        """The last or first `truncate_prompt_tokens` tokens of a prompt (-1: as many as the context holds), else all.

        Raises:
            RequestError: names the field.
        """
        keep = request.truncate_prompt_tokens
        if keep is None:
            if request.truncation_side is not None:
                raise RequestError("truncation_side needs truncate_prompt_tokens", "truncation_side")
            return ids
        most = self.limits.max_model_len
        if keep != -1 and not 1 <= keep <= most:
            raise RequestError(f"truncate_prompt_tokens must be -1 or from 1 to {most}", "truncate_prompt_tokens")
        kept = most if keep == -1 else keep
        return ids[:kept] if request.truncation_side == "right" else ids[-kept:]

    def check_text_length(self, length: int, param: str) -> None:
        """Refuse a text that cannot fit the context, before time is spent on its tokens.

        Raises:
            ContextTooLong: it is too long by far.
        """
        # No vocabulary's tokens are longer than this on average, so the text has more tokens than the context holds.
        most = self.limits.max_model_len * _LONGEST_AVERAGE_TOKEN
        if length > most:
            message = f"a text of {length} characters cannot fit the context of {self.limits.max_model_len} tokens"
            raise ContextTooLong(message, param)


_LONGEST_AVERAGE_TOKEN = 128


def cache_salt(request: SamplingFields) -> str:
    """The salt of a request's prefixes, empty for those shared by all.

    Raises:
        RequestError: it was set to nothing.
    """
    if request.cache_salt == "":
        raise RequestError("cache_salt must not be empty; leave it out to share prefixes with all", "cache_salt")
    return request.cache_salt or ""


def _given(request: SamplingFields, name: str, defaults: Mapping[str, Any]) -> Any:
    value = getattr(request, name)
    return defaults.get(name) if value is None else value


def _stops(stop: str | list[str] | None, defaults: Mapping[str, Any]) -> tuple[str, ...]:
    value = defaults.get("stop") if stop is None else stop
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    out = {}
    for key, value in bias.items():
        # Not int(): it takes " 5 ", "1_0" and digits of other scripts.
        if not key.removeprefix("-").isascii() or not key.removeprefix("-").isdigit() or len(key) > 12:
            raise RequestError(f"logit_bias must map token ids to numbers; {key[:40]!r} is no token id", "logit_bias")
        out[int(key)] = float(value)
    return out
