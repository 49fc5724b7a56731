"""How the tokens of one request are chosen."""

from typing import Any

import msgspec

from rayllm.messages.structured import StructuredOutputs

GREEDY_EPSILON = 1e-5
"""A temperature below this is greedy."""


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long the reasoning of an output may be."""

    budget: int
    """Tokens, of all its reasoning together."""
    inside: bool = False
    """Whether the prompt ends within it."""
    begin_ids: tuple[tuple[int, ...], ...]
    """Each begins it."""
    mark_ids: tuple[tuple[int, ...], ...]
    """What the model ends it with: one of these."""
    end_ids: tuple[int, ...]
    """What it is ended with; ends with the mark."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one choice of one request, already validated (see `rayllm.messages.validate`).

    Token ids are ints in [0, vocabulary size). Strings (`stop`) are looked for by whoever turns tokens into text;
    the engine knows token ids only.
    """

    temperature: float = 1.0
    """0 is greedy; at most 2 by way of HTTP."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output (CTRL, 2019)."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time a token stands in the output."""
    presence_penalty: float = 0.0
    """Subtracted once if a token stands in the output."""
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    """As given; `bad_words_ids` holds what the renderer made of them."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token may not follow the rest."""
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    """No end token and no stop token before so many output tokens."""
    max_tokens: int | None = None
    """None: as many as the context allows."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    """None: one is drawn where the request enters."""
    n: int = 1
    """Choices; each is a request of its own in the engine, with a choice index."""
    logprobs: int | None = None
    """Alternatives reported beside each token (0: the chosen one only; -1: the whole vocabulary)."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens reported beside each in place of the likeliest alternatives. Goes with `logprobs`."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for prompt tokens."""
    stream_interval: int | None = None
    """Tokens between two outputs but the first and the last. None: as the engine has it."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    """The form of the output; None: any."""
    thinking: Thinking | None = None
    """None: reasoning is like any text."""
    extra_args: dict[str, msgspec.Raw | str | int | float | bool | list[Any] | dict[str, Any] | None] | None = None
    """Arguments for logits processors, by name."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_EPSILON
