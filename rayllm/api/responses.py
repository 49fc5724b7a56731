"""`/v1/responses`: create, stream, retrieve, cancel, delete. Answers come from chat completions."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rayllm.api.answer import Sink, answer, stream_answer
from rayllm.api.call import Call
from rayllm.api.chat import BegunChat, Chat
from rayllm.api.choice import Choice
from rayllm.api.errors import ErrorReply
from rayllm.api.front import Front
from rayllm.api.generate import Rendering
from rayllm.api.hosted import Hosted, host
from rayllm.api.paging import page_of
from rayllm.api.parse import parse_request
from rayllm.api.responses_request import (
    NAMES,
    REFUSED,
    InputTokensRequest,
    ResponsesRequest,
    chat_request,
    from_turn,
    items_of,
    parse,
    turns,
)
from rayllm.api.responses_store import Kept, ResponseStore
from rayllm.api.responses_writer import ResponseWriter
from rayllm.api.tool_servers import ToolServer
from rayllm.api.tool_turns import ToolTurns, TurnsUsage
from rayllm.api.wire import ChatRequest
from rayllm.errors import ContextTooLong, RequestError

Json = dict[str, Any]


class Responses:
    """Answers requests of the responses API. What it stores is kept in this process alone."""

    def __init__(self, front: Front, chat: Chat, rendering: Rendering, servers: Sequence[ToolServer] = ()) -> None:
        """`servers` run the tools that requests do not bring themselves."""
        self._front, self._chat, self._rendering, self._servers = front, chat, rendering, servers
        self._store = ResponseStore()

    async def create(self, call: Call) -> None:
        """Answer an input."""
        request, passed = parse(await call.body(self._front.settings.max_body_bytes))
        await call.while_connected(self._create(call, request, passed))

    async def render(self, call: Call) -> None:
        """An input as a request of `/inference/v1/generate`."""
        request, passed = parse(await call.body(self._front.settings.max_body_bytes))
        request, _ = host(request, self._servers)
        chat = await call.while_connected(self._fitting(request, *self._items(request), passed))
        try:
            await self._rendering.render(call, chat)
        except RequestError as error:
            raise error.renamed(NAMES) from None

    async def count(self, call: Call) -> None:
        """How many tokens an input has."""
        body = await call.body(self._front.settings.max_body_bytes)
        request = parse_request(InputTokensRequest, body, REFUSED)
        self._front.check_model(request)
        request, _ = host(request, self._servers)
        ids = await call.while_connected(self._ids(request))
        await call.json({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def retrieve(self, call: Call) -> None:
        """A stored response, or its events from some number on."""
        kept, query = self._found(call), call.query()
        if query.get("stream", "false") not in ("true", "false"):
            raise RequestError("stream must be true or false", "stream")
        after = query.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 12 or int(after) < -1:
            raise RequestError("starting_after must be the number of an event", "starting_after")
        if query.get("stream") != "true":
            await call.json(kept.response)
            return
        if kept.events is None:
            raise RequestError("only a response that was made with background and stream can be streamed", "stream")
        await call.while_connected(_follow(call, kept, int(after) + 1))

    async def cancel(self, call: Call) -> None:
        """End a background response."""
        kept = self._found(call)
        if not kept.response["background"]:
            raise RequestError("only a response that was made with background can be cancelled", "response_id")
        if kept.task is not None:
            kept.task.cancel()
            await asyncio.wait([kept.task])
        await call.json(kept.response)

    async def delete(self, call: Call) -> None:
        """Forget a response; one that runs ends."""
        kept = self._found(call)
        if kept.task is not None:
            kept.task.cancel()
        self._store.forget(kept.response["id"])
        await call.json({"id": kept.response["id"], "object": "response", "deleted": True})

    async def input_items(self, call: Call) -> None:
        """The items that led to a response."""
        await call.json(page_of(self._found(call).items, call.query(), order="desc"))

    # -- within

    async def _create(self, call: Call, request: ResponsesRequest, passed: Json) -> None:
        store = request.store is not False
        if request.background and not store:
            raise RequestError("background needs store, for the answer to be fetched later", "background")
        if request.background:
            self._store.check_room()
        items, known = self._items(request)
        tools, choice = request.tools, request.tool_choice
        request, hosted = host(request, self._servers)
        chat = await self._fitting(request, items, known, passed)
        begun = await self._begin(call, chat)
        kept: list[Kept] = []

        def ended(response: Json) -> None:
            if kept:
                kept[0].response = response
            elif store:
                self._store.keep(Kept(response, items))

        echoed = {**self._echoed(request, chat), "tools": tools or [], "tool_choice": choice or "auto"}
        told = [str(item.get("server_label")) for item in items if item["type"] == "mcp_list_tools"]
        writer = ResponseWriter(begun, request, echoed, ended, hosted, told)
        if hosted:
            begun = self._with_turns(call, begun, request, hosted, writer, items, known, passed)
            writer.chat = begun
        if not request.background:
            if hosted and not request.stream:
                await self._answer_whole(call, begun.choices[0], writer)
            else:
                await answer(call, begun.choices, writer, bool(request.stream), writer.failed)
            return
        kept.append(Kept(writer.response("in_progress"), items, events=[] if request.stream else None))
        kept[0].task = asyncio.get_running_loop().create_task(self._run(kept[0], call.reply_to, begun, writer))
        self._store.keep(kept[0])
        if request.stream:
            await _follow(call, kept[0], 0)
        else:
            await call.json(kept[0].response)

    async def _run(
        self, kept: Kept, reply_to: Callable[[Exception], ErrorReply], begun: BegunChat, writer: ResponseWriter
    ) -> None:
        """Make a background response."""
        try:
            await stream_answer(_Recorder(kept, reply_to), begun.choices, writer, writer.failed)
        except asyncio.CancelledError:
            kept.response = writer.response("cancelled")
        finally:
            for choice in begun.choices:
                choice.close()
            kept.task = None
            with contextlib.suppress(RequestError):
                # Counted again with all that it holds now, unless it was deleted meanwhile.
                self._store.keep(self._store.get(kept.response["id"]))
            kept.wake()

    def _with_turns(
        self, call: Call, begun: BegunChat, request: ResponsesRequest, hosted: Mapping[str, Hosted],
        writer: ResponseWriter, items: list[Json], known: int, passed: Json,
    ) -> BegunChat:  # fmt: skip
        """A chat that goes on after its calls of hosted tools."""

        async def go_on(used: int, with_tools: bool) -> BegunChat | None:
            most = request.max_output_tokens
            if most is not None and used >= most:
                writer.cut()
                return None
            # The choice was for the first turn: a call that has to be made would be made for ever.
            choice = "auto" if with_tools and self._front.settings.auto_tools else "none"
            left = None if most is None else most - used
            turn = request.model_copy(update={"tool_choice": choice, "max_output_tokens": left})
            next_ = await self._begin(call, await self._fitting(turn, [*items, *writer.output()], known, passed))
            writer.next_turn()
            return next_

        turns = ToolTurns(begun, hosted, writer.open_calls, go_on, request.max_tool_calls)
        return BegunChat([turns], begun.writer, TurnsUsage(turns), begun.id, begun.model)

    async def _answer_whole(self, call: Call, choice: Choice, writer: ResponseWriter) -> None:
        """Answer by what a stream would come to."""
        try:
            async for piece in choice.pieces():
                writer.event(choice, piece)
        finally:
            choice.close()
        await call.json(writer.end())

    async def _begin(self, call: Call, chat: ChatRequest) -> BegunChat:
        try:
            return await self._chat.begin(call, chat, "resp_")
        except RequestError as error:
            raise error.renamed(NAMES) from None

    def _items(self, request: InputTokensRequest) -> tuple[list[Json], int]:
        """The items of earlier turns and of the input, and the number of the former."""
        if request.previous_response_id is None:
            return items_of(request.input), 0
        kept = self._store.get(request.previous_response_id, "previous_response_id")
        if kept.running:
            message = "the response before this one is not finished; wait for it"
            raise RequestError(message, "previous_response_id")
        earlier = kept.conversation
        return [*earlier, *items_of(request.input)], len(earlier)

    def _chat_request(self, request: InputTokensRequest, items: list[Json], known: int, passed: Json) -> ChatRequest:
        try:
            return chat_request(request, items, known, passed)
        except RequestError as error:
            raise error.renamed(NAMES) from None

    async def _ids(self, request: InputTokensRequest) -> list[int]:
        return await self._chat.render(await self._fitting(request, *self._items(request), {}))

    async def _fitting(self, request: InputTokensRequest, items: list[Json], known: int, passed: Json) -> ChatRequest:
        """The chat of some items, with `truncation` `auto` without as many of the oldest turns as do not fit."""
        chat = self._chat_request(request, items, known, passed)
        starts = turns(items)
        if request.truncation != "auto" or not starts or await self._fits(chat):
            return chat

        def from_(start: int) -> ChatRequest:
            left = from_turn(items, start)
            return self._chat_request(request, left, known - (len(items) - len(left)), passed)

        low, high = 0, len(starts) - 1
        while low < high:
            middle = (low + high) // 2
            if await self._fits(from_(starts[middle])):
                high = middle
            else:
                low = middle + 1
        return from_(starts[low])

    async def _fits(self, chat: ChatRequest) -> bool:
        try:
            await self._chat.check_room(chat)
        except ContextTooLong:
            return False
        except RequestError as error:
            raise error.renamed(NAMES) from None
        return True

    def _echoed(self, request: ResponsesRequest, chat: ChatRequest) -> Json:
        """What a response repeats of its request."""
        defaults = self._front.settings.generation_defaults
        return {
            "background": bool(request.background),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "parallel_tool_calls": chat.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": request.reasoning or {},
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": defaults.get("temperature", 1.0) if chat.temperature is None else chat.temperature,
            "text": {"format": {"type": "text"}, **(request.text or {})},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": defaults.get("top_p", 1.0) if chat.top_p is None else chat.top_p,
            "truncation": request.truncation or "disabled",
            "user": request.user,
        }

    def _found(self, call: Call) -> Kept:
        return self._store.get(call.scope["path_params"]["id"])


class _Recorder(Sink):
    """Takes the events of a background response."""

    def __init__(self, kept: Kept, reply_to: Callable[[Exception], ErrorReply]) -> None:
        self._kept, self._reply_to = kept, reply_to

    def reply_to(self, error: Exception) -> ErrorReply:
        return self._reply_to(error)

    async def start_events(self) -> None:
        pass

    async def send_events(self, data: bytes, last: bool = False) -> None:
        if self._kept.events is not None:
            self._kept.events += [event + b"\n\n" for event in data.split(b"\n\n") if event]
            self._kept.wake()


async def _follow(call: Call, kept: Kept, start: int) -> None:
    """Send the events of a background response from one on, until it has ended."""
    assert kept.events is not None
    await call.start_events()
    at = max(0, start)
    while True:
        changed, running = kept.changed, kept.running
        if new := kept.events[at:]:
            at += len(new)
            await call.send_events(b"".join(new))
        elif not running:
            break
        else:
            await changed.wait()
    await call.send_events(b"", last=True)
