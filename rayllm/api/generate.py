"""Tokens in, tokens out: `/inference/v1/generate`, and what makes its requests of those of OpenAI's API."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from rayllm.api.answer import DONE, answer, encode
from rayllm.api.call import Call
from rayllm.api.chat import Chat
from rayllm.api.choice import Choice, Piece
from rayllm.api.completions import Completions
from rayllm.api.front import Front, Prompt, Usage
from rayllm.api.logprobs import LogprobsWriter, bare
from rayllm.api.parse import parse_fields, parse_request
from rayllm.api.wire import ChatRequest, CompletionRequest, Refusal, StreamOptions, Wire
from rayllm.errors import RequestError
from rayllm.messages.embeds import FIELD
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.validate import check_ids, output_room

Json = dict[str, Any]

_MEDIA = "this server takes and gives text only"
REFUSED: Mapping[str, Refusal] = {
    "features": Refusal(_MEDIA),
    "content_parts": Refusal(_MEDIA),
    "kv_transfer_params": Refusal("transfer of KV caches is not configured on this server"),
    "ec_transfer_params": Refusal("transfer of encoder caches is not configured on this server"),
}
_BUDGET = "thinking_token_budget"
_OTHER_NAMES = {"extra_args": "vllm_xargs"}
_OF_NO_EFFECT = ("detokenize", "output_kind")
"""Parameters that say how a Python caller gets its output."""
_INTERNAL = ("bad_words_ids", "spaces_between_special_tokens")


class GenerateRequest(Wire):
    """`POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: Json | None = None
    """Named as in Python; what is left out is the model's default."""
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    output_mode: Literal["tokens", "text"] | None = None
    return_token_ids: bool | None = None
    """Shows the ids of the prompt too."""


class Generate:
    """Answers token ids with token ids."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, call: Call) -> None:
        """Answer one request."""
        body = await call.body(self._front.settings.max_body_bytes)
        await call.while_connected(self._answer(call, parse_request(GenerateRequest, body, REFUSED)))

    async def _answer(self, call: Call, request: GenerateRequest) -> None:
        front = self._front
        model = front.check_model(request)
        completion, budget = _completion_request(request)
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options needs stream to be true", "stream_options")
        params = front.sampling.params(completion, completion.logprobs, completion.max_tokens)
        if not request.token_ids:
            raise RequestError("token_ids must not be empty", "token_ids")
        check_ids(request.token_ids, "token_ids", front.limits)
        if budget is not None:
            params = msgspec.structs.replace(params, thinking=front.parsers.thinking(budget, request.token_ids, None))
        room = output_room(len(request.token_ids), completion.max_tokens, front.limits)
        prompt = Prompt(request.token_ids, room)
        id_ = front.name_call(call, completion)
        choices = await front.submit(completion, [prompt], params, id_)
        usage = Usage([prompt], choices, front.settings.prompt_tokens_details)
        await answer(call, choices, GenerateWriter(front, request, completion, id_, model, usage), bool(request.stream))


class GenerateWriter:
    """Writes answers of `/inference/v1/generate`."""

    def __init__(
        self, front: Front, request: GenerateRequest, completion: CompletionRequest, id_: str, model: str, usage: Usage
    ) -> None:
        self._request, self._completion, self._usage = request, completion, usage
        self._logprobs = LogprobsWriter(front.renderer.speller, front.settings.tokens_as_token_ids)
        self._mode = request.output_mode or "tokens"
        self._base = {"request_id": id_, "model": model, "created": int(time.time()), "output_mode": self._mode}
        options = request.stream_options
        self._final_usage = front.settings.force_usage or bool(options and options.include_usage)
        self._every_usage = bool(options and options.continuous_usage_stats)

    def opening(self) -> bytes:
        """The prompt's tokens, if asked for."""
        if not self._request.return_token_ids:
            return b""
        return self._event({"choices": [], "prompt_token_ids": self._request.token_ids})

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """One chunk."""
        if not piece.token_ids and piece.finish_reason is None:
            return b""
        return self._event({"choices": [self._choice(choice.index, piece)]}, self._every_usage)

    def closing(self) -> bytes:
        """The usage, if asked for, and the mark of the end."""
        return (self._event({"choices": []}, True) if self._final_usage else b"") + DONE

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """The body of a whole answer."""
        choices = [self._choice(i, piece) for i, piece in enumerate(pieces)]
        out = {**self._base, "choices": choices, "usage": self._usage.now(), "prompt_logprobs": None}
        if self._completion.prompt_logprobs is not None:
            out["prompt_logprobs"] = self._logprobs.prompt(pieces[0].prompt_logprobs or [])
        if self._request.return_token_ids:
            out["prompt_token_ids"] = self._request.token_ids
        return out

    def _event(self, fields: Json, usage: bool = False) -> bytes:
        more = {"usage": self._usage.now()} if usage else {}
        return b"data: " + encode({**self._base, **fields, **more}) + b"\n\n"

    def _choice(self, index: int, piece: Piece) -> Json:
        out: Json = {
            "index": index,
            "token_ids": piece.token_ids,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        texts = self._mode == "text"
        if self._completion.logprobs is not None:
            out["logprobs"] = self._logprobs.chat(piece.logprobs) if texts else bare(piece.logprobs)
        if texts:
            out["text"] = piece.text
        return out


class Rendering:
    """Turns requests into those of `/inference/v1/generate`, without answering them."""

    def __init__(self, front: Front, chat: Chat, completions: Completions) -> None:
        self._front, self._chat, self._completions = front, chat, completions

    async def chat(self, call: Call) -> None:
        """A conversation as one request."""
        request = parse_request(ChatRequest, await call.body(self._front.settings.max_body_bytes))
        await self.render(call, request)

    async def render(self, call: Call, request: ChatRequest) -> None:
        """Answer with a chat as one request, whichever API it came by."""
        ready = await call.while_connected(self._chat.prepare(request))
        if ready.prompt.embeds:
            raise RequestError("prompt_embeds cannot be written as token ids; send them to be answered", FIELD)
        await call.json(_generate_fields(call, request, ready.model, ready.params, ready.prompt))

    async def completions(self, call: Call) -> None:
        """Each prompt as a request."""
        request = parse_request(CompletionRequest, await call.body(self._front.settings.max_body_bytes))
        if request.prompt_embeds is not None:
            raise RequestError("prompt_embeds cannot be written as token ids; send them to /v1/completions", FIELD)
        model, params, prompts = await call.while_connected(self._completions.prepare(request))
        await call.json([_generate_fields(call, request, model, params, prompt) for prompt in prompts])


def _completion_request(request: GenerateRequest) -> tuple[CompletionRequest, int | None]:
    """The same for text completions, and the most tokens of reasoning."""
    given = {_OTHER_NAMES.get(name, name): value for name, value in (request.sampling_params or {}).items()}
    fields = {name: value for name, value in given.items() if name not in _OF_NO_EFFECT}
    own = {
        "prompt",
        "model",
        "stream",
        "stream_options",
        "echo",
        "suffix",
        "best_of",
        "prompt_embeds",
        "request_id",
        "truncate_prompt_tokens",
    }
    if wrong := own & fields.keys():
        raise RequestError(f"sampling_params has no {min(wrong)!r}", "sampling_params")
    budget = fields.pop(_BUDGET, None)
    if budget is not None and type(budget) is not int:
        raise RequestError(f"sampling_params: {_BUDGET} must be a whole number", "sampling_params")
    fields |= {"cache_salt": request.cache_salt, "priority": request.priority, "request_id": request.request_id}
    try:
        return parse_fields(CompletionRequest, {**fields, "stream": request.stream}), budget
    except RequestError as error:
        raise RequestError(f"sampling_params: {error.message}", "sampling_params") from None


def _generate_fields(
    call: Call, request: ChatRequest | CompletionRequest, model: str, params: SamplingParams, prompt: Prompt
) -> Json:
    """A request that gives the same tokens."""
    sampling = msgspec.to_builtins(msgspec.structs.replace(params, max_tokens=prompt.max_tokens))
    for name in _INTERNAL:
        sampling.pop(name, None)
    if thinking := sampling.pop("thinking", None):
        sampling[_BUDGET] = thinking["budget"]
    if request.seed is None:
        sampling.pop("seed", None)  # one is drawn anew
    return {
        "request_id": request.request_id or call.id,
        "model": model,
        "token_ids": prompt.token_ids,
        "sampling_params": sampling,
        "stream": bool(request.stream),
        "stream_options": None if request.stream_options is None else request.stream_options.model_dump(),
        "cache_salt": request.cache_salt,
        "priority": request.priority or 0,
    }
