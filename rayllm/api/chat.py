"""`POST /v1/chat/completions`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rayllm.api.answer import DONE, answer, encode
from rayllm.api.call import Call
from rayllm.api.choice import Choice, Echo, Piece
from rayllm.api.conversation import last_role, last_text, render
from rayllm.api.embeds import check_embeds, lengths, marked, placed
from rayllm.api.forced import Forced, forced_calls
from rayllm.api.front import Counted, Front, Prompt, Usage, check_stream
from rayllm.api.functions import NAMES, with_function_call, with_tools
from rayllm.api.logprobs import LogprobsWriter
from rayllm.api.parse import parse_request
from rayllm.api.parsing import delta_of, message_of
from rayllm.api.stored_chats import StoredChats
from rayllm.api.wire import ChatRequest
from rayllm.errors import RequestError
from rayllm.messages.engine import Embeds
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.validate import check_logprobs, output_room

Json = dict[str, Any]


class Chat:
    """Answers chat completions."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.stored = StoredChats(front)

    async def __call__(self, call: Call) -> None:
        """Answer one request."""
        request = parse_request(ChatRequest, await call.body(self._front.settings.max_body_bytes))
        await call.while_connected(self._answer(call, request))

    async def _answer(self, call: Call, request: ChatRequest) -> None:
        keep = self.stored.keeper(request) if request.store else None
        begun = await self.begin(call, request)
        writer = begun.writer if keep is None else keep(begun.writer)
        await answer(call, begun.choices, writer, bool(request.stream))

    async def begin(self, call: Call, request: ChatRequest, prefix: str = "chatcmpl-") -> "BegunChat":
        """Check a request and have its choices admitted. The answer's id begins with `prefix`.

        Raises:
            RequestError, Overloaded: it was refused.
        """
        front = self._front
        ready = await self.prepare(request)
        external_id = f"{prefix}{front.name_call(call, request)}"
        choices = await front.submit(request, [ready.prompt], ready.params, external_id)
        usage = Usage([ready.prompt], choices, front.settings.prompt_tokens_details)
        writer = ChatWriter(front, request, external_id, ready.model, ready.role, ready.prompt, usage)
        return BegunChat(choices, writer, usage, external_id, ready.model)

    async def prepare(self, request: ChatRequest) -> "ReadyChat":
        """Check a request and render it.

        Raises:
            RequestError: it was refused.
        """
        modern = with_tools(request)
        try:
            return await self._prepare(modern, older=modern is not request)
        except RequestError as error:
            raise (error if modern is request else error.renamed(NAMES)) from None

    async def _prepare(self, request: ChatRequest, older: bool) -> "ReadyChat":
        front = self._front
        model = front.check_model(request)
        check_stream(request)
        callable_tools = _callable_tools(request, front.settings.auto_tools)
        if request.include_reasoning is False and not front.parsers.part_reasoning:
            message = "include_reasoning needs a server that tells reasoning apart; start it with --reasoning-parser"
            raise RequestError(message, "include_reasoning")
        wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        if wanted == 0:
            raise RequestError("max_tokens must be at least 1", "max_tokens")
        params = front.sampling.params(request, self._alternatives(request), wanted)
        forced = _forced(request, params)
        if forced is not None:
            params = msgspec.structs.replace(params, structured_outputs=forced.form)
        ids, embeds = await self._prompt(request)
        ids = front.sampling.truncated(ids, request)
        room = output_room(len(ids), wanted, front.limits)
        role = front.settings.response_role if request.add_generation_prompt is not False else last_role(request)
        if request.continue_final_message:
            role = last_role(request)
        echo = Echo(last_text(request)) if request.echo and last_role(request) == role else None
        continued = last_text(request) if request.continue_final_message else None
        parsing = front.parsers.parsing(
            ids,
            continued,
            callable_tools,
            request.include_reasoning is not False,
            request.parallel_tool_calls is not False,
            None if forced is None else forced.parser,
            _reason_of_calls(request, older),
        )
        if params.structured_outputs is not None:
            form = front.parsers.after_reasoning(params.structured_outputs, ids, continued)
            params = msgspec.structs.replace(params, structured_outputs=form)
        if request.thinking_token_budget is not None:
            thinking = front.parsers.thinking(request.thinking_token_budget, ids, continued)
            params = msgspec.structs.replace(params, thinking=thinking)
        return ReadyChat(model, params, Prompt(ids, room, echo, parsing, embeds), role)

    async def _prompt(self, request: ChatRequest) -> tuple[list[int], tuple[Embeds, ...]]:
        """The tokens of a conversation, and what stands in place of some of them."""
        messages, files = marked(request.messages or ())
        if not files:
            return await self.render(request), ()
        check_embeds(self._front, request)
        tokens = lengths(files)
        ids = await self.render(request.model_copy(update={"messages": messages}), tokens)
        return placed(ids, files, tokens)

    async def check_room(self, request: ChatRequest) -> None:
        """Check that the conversation leaves room for an answer.

        Raises:
            ContextTooLong: it does not.
            RequestError: it cannot be rendered.
        """
        ids = await self.render(request)
        output_room(len(ids), request.max_completion_tokens, self._front.limits)

    async def render(self, request: ChatRequest, embeds: Sequence[int] = ()) -> list[int]:
        """The tokens of its conversation. `embeds` are as `rayllm.api.conversation.render` has them.

        Raises:
            RequestError: the conversation cannot be rendered.
        """
        with_tools = self._front.settings.unused_tools or request.tool_choice != "none"
        return await render(self._front, request, bool(request.add_special_tokens), with_tools, embeds)

    def _alternatives(self, request: ChatRequest) -> int | None:
        """How many alternatives to report beside each token; None: no logprobs."""
        check_logprobs(request.top_logprobs, "top_logprobs", self._front.limits)
        if request.logprobs:
            return request.top_logprobs or 0
        if request.top_logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        return None


@dataclass(frozen=True, slots=True)
class ReadyChat:
    """A chat that can be submitted."""

    model: str
    params: SamplingParams
    prompt: Prompt
    role: str
    """Who answers."""


@dataclass(frozen=True, slots=True)
class BegunChat:
    """A chat that engines have admitted. Whoever has it closes its choices."""

    choices: list[Choice]
    writer: "ChatWriter"
    usage: Counted
    id: str
    model: str


class ChatWriter:
    """Writes answers of chat completions."""

    def __init__(
        self, front: Front, request: ChatRequest, id_: str, model: str, role: str, prompt: Prompt, usage: Usage
    ) -> None:
        self._request, self._role, self._prompt_ids, self._usage = request, role, prompt.shown_ids(), usage
        self._logprobs = LogprobsWriter(
            front.renderer.speller, request.return_tokens_as_token_ids or front.settings.tokens_as_token_ids
        )
        self._base = {"id": id_, "created": int(time.time()), "model": model}
        self._head = b"data: " + encode({**self._base, "object": "chat.completion.chunk"})[:-1] + b',"choices":['
        self._older = bool(request.functions)
        self._token_ids = request.return_token_ids or front.settings.tokens_only
        options = request.stream_options
        self._final_usage = front.settings.force_usage or bool(options and options.include_usage)
        self._every_usage = bool(options and options.continuous_usage_stats)
        self._tail = b'],"usage":null}\n\n' if self._final_usage else b"]}\n\n"

    def opening(self) -> bytes:
        """One chunk for each choice that tells the role."""
        chunks = []
        for index in range(self._request.n or 1):
            delta = {"role": self._role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            end = self._end()
            if self._token_ids and index == 0:
                end = b'],"prompt_token_ids":' + encode(self._prompt_ids) + end.removeprefix(b"]")
            chunks.append(self._head + encode(choice) + end)
        return b"".join(chunks)

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """One chunk."""
        plain = piece.finish_reason is None and not piece.logprobs and not self._token_ids
        if piece.events is not None:
            if plain and not piece.events:
                return b""
            return self._parsed_event(choice.index, piece, plain)
        if plain:
            if not piece.text:
                return b""
            body = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
                choice.index,
                encode(piece.text),
            )
            return self._head + body + self._end()
        delta = {"content": piece.text} if piece.text else {}
        return self._head + encode({"index": choice.index, "delta": delta, **self._rest(piece)}) + self._end()

    def _parsed_event(self, index: int, piece: Piece, plain: bool) -> bytes:
        assert piece.events is not None
        delta = delta_of(piece.events)
        if self._older:
            delta = with_function_call(delta)
        if plain and not delta:
            return b""
        rest = {"logprobs": None, "finish_reason": None} if plain else self._rest(piece)
        return self._head + encode({"index": index, "delta": delta, **rest}) + self._end()

    def closing(self) -> bytes:
        """The usage, if asked for, and the mark of the end."""
        if not self._final_usage:
            return DONE
        return self._head + b'],"usage":' + encode(self._usage.now()) + b"}\n\n" + DONE

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """The body of a whole answer."""
        choices = []
        for index, piece in enumerate(pieces):
            message = {"role": self._role, "content": piece.text, "refusal": None}
            if piece.events is not None:
                message |= message_of(piece.events)
            if self._older:
                message = with_function_call(message)
            choices.append({"index": index, "message": message, **self._rest(piece)})
        out = {
            **self._base,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage.now(),
            "system_fingerprint": None,
        }
        if self._request.service_tier is not None:
            out["service_tier"] = "default"
        if self._request.prompt_logprobs is not None:
            out["prompt_logprobs"] = self._logprobs.prompt(pieces[0].prompt_logprobs or [])
        if self._token_ids:
            out["prompt_token_ids"] = self._prompt_ids
        return out

    def _rest(self, piece: Piece) -> Json:
        """What follows the text of a choice."""
        rest: Json = {
            "logprobs": self._logprobs.chat(piece.logprobs) if self._request.logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._token_ids:
            rest["token_ids"] = piece.token_ids
        return rest

    def _end(self) -> bytes:
        if self._every_usage:
            return b'],"usage":' + encode(self._usage.now()) + b"}\n\n"
        return self._tail


def _callable_tools(request: ChatRequest, auto: bool) -> list[Json]:
    """The tools that the answer may call. `auto` says that models may choose tools themselves here.

    Raises:
        RequestError: names the field.
    """
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", "tool_choice")
        return []
    for i, tool in enumerate(request.tools):
        _check_tool(tool, f"tools[{i}]")
    if choice == "none":
        return []
    if choice is None or choice == "auto":
        if not auto:
            raise RequestError(
                "tools with tool_choice 'auto' need a parser for the model's tool calls, and this server has none; "
                "set tool_choice to 'none', or start the server with --enable-auto-tool-choice and --tool-call-parser",
                "tool_choice",
            )
        return request.tools
    return request.tools


def _forced(request: ChatRequest, params: SamplingParams) -> Forced | None:
    """The calls that a request forces, None where it forces none.

    Raises:
        RequestError: names the field.
    """
    choice = request.tool_choice
    if not request.tools or choice in (None, "none", "auto"):
        return None
    assert choice is not None
    if params.structured_outputs is not None:
        field = params.structured_outputs.field
        raise RequestError(f"{field} and a forced tool call exclude each other; leave one out", field)
    return forced_calls(request.tools, choice, request.parallel_tool_calls is not False)


def _reason_of_calls(request: ChatRequest, older: bool) -> str:
    """The finish reason of an answer that calls tools. One that had to call a certain function stopped, as OpenAI
    has it, for the client knows what it is.
    """
    if isinstance(request.tool_choice, dict):
        return "stop"
    return "function_call" if older else "tool_calls"


def _check_tool(tool: Json, place: str) -> None:
    function = tool.get("function")
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    if tool.get("type") != "function" or not named:
        raise RequestError(f"{place} must be a function with a name", place)
    assert isinstance(function, dict)
    if not isinstance(function.get("parameters") or {}, dict):
        raise RequestError(f"{place}.function.parameters must be a JSON schema", f"{place}.function.parameters")
