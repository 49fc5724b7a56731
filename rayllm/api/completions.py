"""`POST /v1/completions`."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from rayllm.api.answer import DONE, answer, encode
from rayllm.api.call import Call
from rayllm.api.choice import Choice, Echo, Piece
from rayllm.api.embeds import check_embeds
from rayllm.api.front import Front, Prompt, Usage, check_stream
from rayllm.api.logprobs import LogprobsWriter, offsets_of
from rayllm.api.parse import parse_request
from rayllm.api.wire import CompletionRequest
from rayllm.errors import RequestError
from rayllm.messages.embeds import decoded, saved_shape
from rayllm.messages.engine import Embeds
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.validate import check_ids, output_room

Json = dict[str, Any]

_DEFAULT_MAX_TOKENS = 16
"""As OpenAI documents it."""


class Completions:
    """Answers text completions."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, call: Call) -> None:
        """Answer one request."""
        request = parse_request(CompletionRequest, await call.body(self._front.settings.max_body_bytes))
        await call.while_connected(self._answer(call, request))

    async def _answer(self, call: Call, request: CompletionRequest) -> None:
        front = self._front
        model, params, prompts = await self.prepare(request)
        external_id = f"cmpl-{front.name_call(call, request)}"
        choices = await front.submit(request, prompts, params, external_id)
        usage = Usage(prompts, choices, front.settings.prompt_tokens_details)
        writer = CompletionWriter(front, request, external_id, model, prompts, usage)
        await answer(call, choices, writer, bool(request.stream))

    async def prepare(self, request: CompletionRequest) -> tuple[str, SamplingParams, list[Prompt]]:
        """Check a request and tokenize it: the model's name, the parameters and the prompts.

        Raises:
            RequestError: it was refused.
        """
        front = self._front
        model = front.check_model(request)
        _check_fields(request)
        logprobs = request.logprobs
        params = front.sampling.params(request, logprobs, request.max_tokens)
        if request.echo and logprobs is not None and params.prompt_logprobs is None:
            params = msgspec.structs.replace(params, prompt_logprobs=logprobs)
        prompts = [self._embedded(request, saved) for saved in _listed(request.prompt_embeds)]
        if not prompts or request.prompt not in (None, ""):  # clients that must send a prompt send an empty one
            prompts += [await self._prompt(request, prompt) for prompt in prompts_of(request.prompt)]
        return model, params, prompts

    def _embedded(self, request: CompletionRequest, encoded: str) -> Prompt:
        front = self._front
        check_embeds(front, request)
        saved = decoded(encoded)
        tokens, _ = saved_shape(saved)
        room = output_room(tokens, request.max_tokens, front.limits, _DEFAULT_MAX_TOKENS)
        return Prompt([0] * tokens, room, embeds=(Embeds(0, saved),))

    async def _prompt(self, request: CompletionRequest, prompt: str | list[int]) -> Prompt:
        front = self._front
        if isinstance(prompt, str):
            front.sampling.check_text_length(len(prompt), "prompt")
            ids = await front.service.tokenize(prompt, request.add_special_tokens is not False)
        else:
            check_ids(prompt, "prompt", front.limits)
            ids = prompt
        if not ids:
            raise RequestError("the prompt has no tokens; this model has no start token to put before it", "prompt")
        kept = front.sampling.truncated(ids, request)
        room = output_room(len(kept), request.max_tokens, front.limits, _DEFAULT_MAX_TOKENS)
        echo = self._echo(request, prompt if kept is ids else kept, kept) if request.echo else None
        return Prompt(kept, room, echo)

    def _echo(self, request: CompletionRequest, prompt: str | list[int], ids: list[int]) -> Echo:
        tokenizer, skip = self._front.renderer.tokenizer, request.skip_special_tokens is not False
        text = prompt if isinstance(prompt, str) else tokenizer.decode(ids, skip)
        if request.logprobs is None:
            return Echo(text)
        return Echo(text, ids, offsets_of(ids, tokenizer, skip))


class CompletionWriter:
    """Writes answers of text completions."""

    def __init__(
        self, front: Front, request: CompletionRequest, id_: str, model: str, prompts: Sequence[Prompt], usage: Usage
    ) -> None:
        self._request, self._prompts, self._usage = request, prompts, usage
        self._logprobs = LogprobsWriter(
            front.renderer.speller, request.return_tokens_as_token_ids or front.settings.tokens_as_token_ids
        )
        self._base = {"id": id_, "object": "text_completion", "created": int(time.time()), "model": model}
        self._head = b"data: " + encode(self._base)[:-1] + b',"choices":['
        self._token_ids = request.return_token_ids or front.settings.tokens_only
        options = request.stream_options
        self._final_usage = front.settings.force_usage or bool(options and options.include_usage)
        self._every_usage = bool(options and options.continuous_usage_stats)
        self._tail = b'],"usage":null}\n\n' if self._final_usage else b"]}\n\n"
        self._per_prompt = request.n or 1
        self._opened: set[int] = set()

    def opening(self) -> bytes:
        """Nothing: the first chunk has text."""
        return b""

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """One chunk."""
        first = choice.index not in self._opened
        plain = piece.finish_reason is None and not piece.logprobs and not self._token_ids
        if plain and not piece.text:
            return b""
        self._opened.add(choice.index)
        if plain:
            body = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (choice.index, encode(piece.text))
        else:
            body = encode(self._choice(choice.index, piece, first))
        return self._head + body + self._end()

    def closing(self) -> bytes:
        """The usage, if asked for, and the mark of the end."""
        if not self._final_usage:
            return DONE
        return self._head + b'],"usage":' + encode(self._usage.now()) + b"}\n\n" + DONE

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """The body of a whole answer."""
        choices = [self._choice(i, piece, True) for i, piece in enumerate(pieces)]
        for choice, piece in zip(choices, pieces, strict=True):
            asked = self._request.prompt_logprobs is not None
            choice["prompt_logprobs"] = self._logprobs.prompt(piece.prompt_logprobs or []) if asked else None
        out = {**self._base, "choices": choices, "usage": self._usage.now(), "system_fingerprint": None}
        return out if self._request.service_tier is None else {**out, "service_tier": "default"}

    def _end(self) -> bytes:
        if self._every_usage:
            return b'],"usage":' + encode(self._usage.now()) + b"}\n\n"
        return self._tail

    def _choice(self, index: int, piece: Piece, first: bool) -> Json:
        wanted = self._request.logprobs is not None
        out = {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs.text(piece.logprobs, piece.logprob_ids, piece.offsets) if wanted else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._token_ids:
            out["token_ids"] = piece.token_ids
            prompt = self._prompts[index // self._per_prompt]
            out["prompt_token_ids"] = prompt.shown_ids() if first else None
        return out


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a request: a text, texts, token ids, or lists of token ids.

    Raises:
        RequestError: it is none of these, or empty.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt must be a text, a list of token ids, or a list of such, and not empty", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        return prompt
    raise RequestError("prompt must hold texts only, token ids only, or lists of token ids only", "prompt")


def _listed(embeds: str | list[str] | None) -> list[str]:
    return [embeds] if isinstance(embeds, str) else embeds or []


def _check_fields(request: CompletionRequest) -> None:
    check_stream(request)
    if request.suffix:
        raise RequestError("suffix cannot be used: this server does not insert; give the text before it", "suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError("best_of must equal n: choices are not ranked; ask for n and pick", "best_of")
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens must be at least 1, or 0 with echo", "max_tokens")
