"""What clients send: the fields of each request, as the OpenAI API and vLLM's additions to it name them.

Types are checked here, ranges in `rayllm.messages.validate`. None always means that a field was left out. A field that
is in none of these lists is refused by name, and so is a value that only a later part of rayllm can honour.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Json = dict[str, Any]


class Wire(BaseModel):
    """Base of all requests. Strict: "1" is no number, true is no 1."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    model: str | None = None
    """Any of the served names; left out, the first."""


class StreamOptions(BaseModel):
    """What a stream tells about usage."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    include_usage: bool | None = None
    """One more chunk at the end has the usage, and no choices."""
    continuous_usage_stats: bool | None = None
    """Every chunk has the usage so far."""
    include_obfuscation: Literal[False] | None = None


class SamplingFields(Wire):
    """Fields that chat and text completions share."""

    # OpenAI's
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    service_tier: Literal["auto", "default"] | None = None
    """There is one tier, which the answer then names."""
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    """For the client's own records."""
    metadata: Json | None = None
    """For the client's own records."""

    response_format: Json | None = None

    # vLLM's
    add_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    cache_salt: str | None = None
    echo: bool | None = None
    guided_choice: list[str] | None = None
    guided_decoding_backend: str | None = None
    guided_grammar: str | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_whitespace_pattern: str | None = None
    ignore_eos: bool | None = None
    logprob_token_ids: list[int] | None = None
    """With logprobs: the tokens whose log-probabilities are told beside each, in place of the likeliest ones."""
    length_penalty: float | None = None
    """The power of its length by which a beam's sum of log-probabilities is divided; left out, 1."""
    include_stop_str_in_output: bool | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    priority: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    """Tokens between two chunks but the first and the last; left out, as --stream-interval says."""
    stop_token_ids: list[int] | None = None
    structural_tag: str | Json | None = None
    structured_outputs: Json | None = None
    top_k: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    """Which end of a prompt that is too long goes; left out, the left one."""
    use_beam_search: bool | None = None
    """Gives the `n` likeliest continuations of as many beams."""
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | list[Any] | None = None
    """A text, texts, token ids, or lists of token ids."""
    prompt_embeds: str | list[str] | None = None
    """Prompts as embeddings, answered before those of `prompt`: files of `torch.save` in base64."""
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatTemplateFields(Wire):
    """How a conversation becomes a prompt."""

    messages: list[Any] | None = None
    tools: list[Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    documents: list[Json] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ChatRequest(SamplingFields, ChatTemplateFields):
    """`POST /v1/chat/completions`."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    """False keeps the first call only."""
    thinking_token_budget: int | None = None
    """The most tokens of reasoning, after which it is ended."""
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""
    functions: list[Json] | None = None
    """The older form of `tools`; an answer calls one at most."""
    function_call: str | Json | None = None
    """The older form of `tool_choice`: `none`, `auto`, or an object with the name of a function."""
    store: bool | None = None
    """Keeps the answer, for `GET /v1/chat/completions/{id}` and the like."""


class TokenizeRequest(ChatTemplateFields):
    """`POST /tokenize`: a `prompt`, or `messages` and what belongs to them."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """`POST /detokenize`."""

    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that is known but cannot be honoured. `neutral` values ask for nothing, and are taken."""

    why: str
    neutral: tuple[Any, ...] = ()


_MEDIA = "this server takes and gives text only"

REFUSED: Mapping[str, Refusal] = {
    "early_stopping": Refusal("beam search stops when no beam can get better; leave the field out", (False,)),
    "prompt_embeds": Refusal("embeddings are taken as parts of contents, and by /v1/completions"),
    "modalities": Refusal(_MEDIA, (["text"],)),
    "audio": Refusal(_MEDIA),
    "mm_processor_kwargs": Refusal(_MEDIA),
    "media_io_kwargs": Refusal(_MEDIA),
    "reasoning": Refusal("use reasoning_effort and include_reasoning"),
    "verbosity": Refusal(
        "this model has no such setting; say in the prompt how long the answer should be", ("medium",)
    ),
    "web_search_options": Refusal("this server does not search the web"),
    "prediction": Refusal("predicted outputs are not available; leave the field out"),
    "store": Refusal("only chat completions and responses are kept; leave the field out", (False,)),
    "watermarking": Refusal("outputs are not watermarked; leave the field out", (False,)),
    "repetition_detection": Refusal("repetitions are not looked for; use repetition_penalty or a stop string"),
    "session_id": Refusal("requests are placed by load; prefixes are found by content"),
    "return_token_offsets": Refusal("offsets of a prompt are told with echo and logprobs in /v1/completions", (False,)),
    "return_prompt_text": Refusal("use /v1/chat/completions/render and /detokenize", (False,)),
    "return_mm_kwargs": Refusal(_MEDIA, (False,)),
    "mm_payload": Refusal(_MEDIA),
    "routed_experts_prompt_start": Refusal("routed experts are not told", (0,)),
    "moderation": Refusal("this server does not moderate; leave the field out"),
    "prompt_cache_options": Refusal("prefixes are cached by content; leave the field out"),
    "ec_transfer_params": Refusal("transfer of encoder caches is not configured on this server"),
    "kv_transfer_params": Refusal("transfer of KV caches is not configured on this server"),
    "logits_processors": Refusal("processors are set at start by --logits-processors; give arguments in vllm_xargs"),
    "prompt_cache_retention": Refusal("cached prefixes are kept as long as there is room", ("in-memory",)),
}

IGNORABLE = frozenset({"safety_identifier", "prompt_cache_key"})
"""Fields that, as OpenAI documents them, ask for nothing of a server that has one user base and caches by content."""
