"""What clients get: the whole answers of each endpoint, for the OpenAPI document.

Answers are written elsewhere, by hand and fast; tests hold them to these. A field with the default None may be absent,
and one without a default is always there. Streams send the same in pieces.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

Json = dict[str, Any]
Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort"]


class Answer(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="forbid")


# -- errors


class ErrorDetail(Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field that is to blame."""
    code: str | None


class Error(Answer):
    """A refusal or a failure."""

    error: ErrorDetail


class MessagesErrorDetail(Answer):
    """What went wrong."""

    type: str
    message: str


class MessagesError(Answer):
    """A refusal or a failure, as Anthropic has it."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


# -- chat and text completions


class PromptTokensDetails(Answer):
    """Tells of a prompt's tokens."""

    cached_tokens: Count


class CompletionTokensDetails(Answer):
    """Tells of an output's tokens."""

    reasoning_tokens: Count


class Usage(Answer):
    """Tokens that were read and written."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | None = None


class TokenLogprob(Answer):
    """A token, and how likely it was."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenTokenLogprob(TokenLogprob):
    """A token of the output."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """An entry for each token."""

    content: list[ChosenTokenLogprob]
    refusal: None


class PromptLogprob(Answer):
    """How likely a token of the prompt was."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(Answer):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call that the client is to make."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """What was answered."""

    role: str
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same, under its older name."""
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    """What an answer to `functions` calls."""


class ChatChoice(Answer):
    """One of `n` answers."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatAnswer(Answer):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    service_tier: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class StoredChat(ChatAnswer):
    """A chat completion that is kept."""

    metadata: dict[str, str]


class Page(Answer):
    """A page of a list."""

    object: Literal["list"]
    first_id: str
    last_id: str
    has_more: bool


class StoredChats(Page):
    """Chat completions that are kept."""

    data: list[StoredChat]


class StoredMessages(Page):
    """The messages that led to one."""

    data: list[Json]


class DeletedChat(Answer):
    """One that is kept no more."""

    id: str
    object: Literal["chat.completion.deleted"]
    deleted: Literal[True]


class TextLogprobs(Answer):
    """Four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One of `n` continuations of a prompt."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(Answer):
    """A text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None
    service_tier: str | None = None


# -- tokens


class TokenizeAnswer(Answer):
    """Token ids."""

    count: Count
    max_model_len: Count
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    """The text of tokens."""

    prompt: str


class RankedLogprob(Answer):
    """A token by its id, and how likely it was."""

    token_id: int
    logprob: float
    rank: int


class ChosenRankedLogprob(RankedLogprob):
    """A token of the output."""

    top_logprobs: list[RankedLogprob]


class RankedLogprobs(Answer):
    """An entry for each token."""

    content: list[ChosenRankedLogprob]


class GenerateChoice(Answer):
    """One of `n` continuations."""

    index: Count
    token_ids: list[int]
    logprobs: RankedLogprobs | ChatLogprobs | None
    """With `output_mode` text as in chat completions."""
    finish_reason: FinishReason
    stop_reason: str | int | None
    text: str | None = None


class GenerateAnswer(Answer):
    """Tokens that follow tokens."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"]
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None = None


class RenderedAnswer(Answer):
    """A request of `/inference/v1/generate`."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: Json
    stream: bool
    stream_options: Json | None
    cache_salt: str | None
    priority: int


class RenderedAnswers(RootModel[list[RenderedAnswer]]):
    """A request of `/inference/v1/generate` for each prompt."""


class AbortAnswer(Answer):
    """How many requests were ended."""

    aborted: Count


# -- messages


class MessagesUsage(Answer):
    """Tokens that were read and written; those from the cache are counted apart."""

    input_tokens: Count
    output_tokens: Count
    cache_read_input_tokens: Count
    cache_creation_input_tokens: Count


class TextBlock(Answer):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """Reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Answer):
    """A call that the client is to make."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class MessagesAnswer(Answer):
    """A message, as Anthropic has it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    usage: MessagesUsage
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None


class CountTokensAnswer(Answer):
    """The number of tokens."""

    input_tokens: Count


# -- responses


class InputTokensDetails(Answer):
    """Tells of the input's tokens."""

    cached_tokens: Count
    cache_write_tokens: Count


class OutputTokensDetails(Answer):
    """Tells of the output's tokens."""

    reasoning_tokens: Count


class ResponsesUsage(Answer):
    """Tokens that were read and written."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class OutputText(Answer):
    """Text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[ChosenTokenLogprob]


class ReasoningText(Answer):
    """Reasoning."""

    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Answer):
    """What was said."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer):
    """What was thought."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Json]
    content: list[ReasoningText]
    encrypted_content: str | None


class FunctionCallItem(Answer):
    """A call that the client is to make."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class HostedItem(BaseModel):
    """A tool that the server itself called, or the tools of one of its tool servers."""

    model_config = ConfigDict(extra="allow")

    type: Literal["mcp_call", "mcp_list_tools", "code_interpreter_call", "web_search_call"]
    id: str


class ResponseError(Answer):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Answer):
    """Why a response is incomplete."""

    reason: str | None


class ResponsesAnswer(Answer):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[MessageItem | ReasoningItem | FunctionCallItem | HostedItem]
    usage: ResponsesUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Json
    service_tier: str
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: Count
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class InputTokensAnswer(Answer):
    """The number of tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: Count


class DeletedResponse(Answer):
    """A response that is forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Page):
    """The items that led to a response."""

    data: list[Json]


# -- the service


class ModelCard(Answer):
    """A model, under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Count


class ModelList(Answer):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(Answer):
    """The version of this software."""

    version: str


class LoadAnswer(Answer):
    """Requests that run or wait."""

    server_load: Count
