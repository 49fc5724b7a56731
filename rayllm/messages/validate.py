"""The ranges that requests must keep to, checked once at the door. Ranges are OpenAI's where OpenAI has the field.

Every check names the field, what it got and what it may be. Values come from clients or from Python callers, so types
are checked too; whoever passes has values that index arrays and enter arithmetic without harm.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rayllm.errors import ContextTooLong, RequestError
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.structured import check_structured

_INT64 = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one service can take."""

    vocab_size: int
    max_model_len: int
    """Tokens of prompt and output together."""
    max_logprobs: int = 20
    """Alternatives to a token; -1: as many as the vocabulary has."""
    max_tokens: int | None = None
    """Tokens of any output; requests for more are cut to it."""
    takes_stops: bool = True
    """Whether there is text in which stop strings can be looked for."""
    max_n: int = 128
    max_stops: int = 64
    max_stop_length: int = 4096
    """Characters in a stop string."""
    max_bad_words: int = 1024
    max_logprob_tokens: int = 128
    """Entries in `logprob_token_ids`."""
    max_token_list: int = 16384
    """Entries in `stop_token_ids` and `logit_bias`."""


def check_sampling(params: SamplingParams, limits: Limits) -> None:
    """Check all of a request's sampling parameters but the room for its output (see `output_room`).

    Raises:
        RequestError: names the field.
    """
    _check_shape(params)
    _check_penalties(params)
    _check_lengths(params, limits)
    _check_tokens(params, limits)
    _check_stops(params, limits)
    if params.structured_outputs is not None:
        check_structured(params.structured_outputs)
    for name in ("logprobs", "prompt_logprobs"):
        check_logprobs(getattr(params, name), name, limits)


def check_ids(ids: Sequence[int], name: str, limits: Limits) -> None:
    """Check that these are token ids.

    Raises:
        RequestError: one is not, or is outside the vocabulary.
    """
    if not set(map(type, ids)) <= {int}:
        raise RequestError(f"{name} must hold token ids, which are whole numbers", name)
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise RequestError(f"{name} holds {wrong}, but token ids go from 0 to {limits.vocab_size - 1}", name)


def check_logprobs(value: Any, name: str, limits: Limits) -> None:
    """Check a number of alternatives.

    Raises:
        RequestError: it is out of range.
    """
    if value is None:
        return
    most = limits.vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
    if limits.max_logprobs == -1 and value == -1:
        return
    _integer(value, name, 0, most)


def output_room(prompt_length: int, wanted: int | None, limits: Limits, default: int | None = None) -> int:
    """The most tokens that an output may have.

    `wanted` is the request's own `max_tokens`. Without one it is `default`, cut to the room that the prompt leaves,
    or all of that room. `limits.max_tokens` cuts them all.

    Raises:
        ContextTooLong: the prompt, or the prompt and the output wanted, exceed the context.
    """
    room = limits.max_model_len - prompt_length
    most = room if limits.max_tokens is None else min(room, limits.max_tokens)
    if wanted is not None and limits.max_tokens is not None:
        wanted = min(wanted, limits.max_tokens)
    least = 1 if wanted is None else wanted
    if least > room or room < 0:
        asked = f"{prompt_length} tokens in the prompt and {least} for the output"
        raise ContextTooLong(
            f"this model's context is {limits.max_model_len} tokens, but {asked} were requested; "
            "shorten the prompt or lower max_tokens",
            "prompt" if room < 1 else "max_tokens",
        )
    if wanted is not None:
        return wanted
    return most if default is None else min(default, most)


def _check_shape(params: SamplingParams) -> None:
    """The fields that shape the distribution."""
    _number(params.temperature, "temperature", 0.0, 2.0)
    _number(params.top_p, "top_p", 0.0, 1.0, above=True)
    _number(params.min_p, "min_p", 0.0, 1.0)
    if params.top_k != -1:  # the other spelling of 0
        _integer(params.top_k, "top_k", 0, _INT64 - 1)
    if params.seed is not None:
        _integer(params.seed, "seed", -_INT64, _INT64 - 1)


def _check_penalties(params: SamplingParams) -> None:
    _number(params.frequency_penalty, "frequency_penalty", -2.0, 2.0)
    _number(params.presence_penalty, "presence_penalty", -2.0, 2.0)
    _number(params.repetition_penalty, "repetition_penalty", 0.0, 1e6, above=True)


def _check_lengths(params: SamplingParams, limits: Limits) -> None:
    _integer(params.n, "n", 1, limits.max_n)
    _integer(params.min_tokens, "min_tokens", 0, limits.max_model_len)
    if params.stream_interval is not None:
        _integer(params.stream_interval, "stream_interval", 1, _INT64 - 1)
    if params.max_tokens is not None:
        _integer(params.max_tokens, "max_tokens", 0, _INT64 - 1)
        if params.min_tokens > params.max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, which is more than max_tokens, {params.max_tokens}", "min_tokens"
            )


def _check_tokens(params: SamplingParams, limits: Limits) -> None:
    _few(params.stop_token_ids, "stop_token_ids", limits.max_token_list)
    check_ids(params.stop_token_ids, "stop_token_ids", limits)
    if params.logprob_token_ids:
        _few(params.logprob_token_ids, "logprob_token_ids", limits.max_logprob_tokens)
        check_ids(params.logprob_token_ids, "logprob_token_ids", limits)
        if params.logprobs is None:
            raise RequestError("logprob_token_ids needs logprobs", "logprob_token_ids")
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty; leave it out to allow all", "allowed_token_ids")
        _few(params.allowed_token_ids, "allowed_token_ids", limits.vocab_size)
        check_ids(params.allowed_token_ids, "allowed_token_ids", limits)
    if params.logit_bias:
        _few(params.logit_bias, "logit_bias", limits.max_token_list)
        check_ids(list(params.logit_bias), "logit_bias", limits)
        for value in params.logit_bias.values():
            _number(value, "logit_bias", -100.0, 100.0)


def _check_stops(params: SamplingParams, limits: Limits) -> None:
    if params.stop and not limits.takes_stops:
        raise RequestError("stop needs text, and this server gives token ids only; use stop_token_ids", "stop")
    for name, texts, most in (
        ("stop", params.stop, limits.max_stops),
        ("bad_words", params.bad_words, limits.max_bad_words),
    ):
        _few(texts, name, most)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise RequestError(f"{name} must not hold an empty text", name)
            if len(text) > limits.max_stop_length:
                message = f"{name} holds a text of {len(text)} characters; the limit is {limits.max_stop_length}"
                raise RequestError(message, name)


def _few(values: Collection[Any], name: str, most: int) -> None:
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} entries; the limit is {most}", name)


def _number(value: Any, name: str, low: float, high: float, above: bool = False) -> None:
    """Check a finite number in [low, high], or in (low, high] if `above`."""
    sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not sound or not low <= value <= high or (above and value == low):
        wanted = f"more than {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be a number {wanted}, not {_shown(value)}", name)


def _integer(value: Any, name: str, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}, not {_shown(value)}", name)


def _shown(value: Any) -> str:
    return repr(value)[:40]
