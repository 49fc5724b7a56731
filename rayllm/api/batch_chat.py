"""`POST /v1/chat/completions/batch`: several conversations in one request, answered together."""

import asyncio
from typing import Any

from rayllm.api.answer import answer
from rayllm.api.call import Call
from rayllm.api.chat import Chat, ChatWriter
from rayllm.api.front import Front, Prompt, Usage
from rayllm.api.parse import parse_fields, parse_json
from rayllm.api.wire import ChatRequest
from rayllm.errors import RequestError

Json = dict[str, Any]

_NOT_IN_BATCHES = (
    "echo",
    "prompt_logprobs",
    "store",
    "stream",
    "stream_options",
    "tools",
    "functions",
    "return_token_ids",
)


class BatchChatRequest(ChatRequest):
    """`POST /v1/chat/completions/batch`: `messages` is a list of conversations."""


class BatchChat:
    """Answers batches of chats: `n` choices for each conversation, numbered conversation by conversation."""

    def __init__(self, front: Front, chat: Chat) -> None:
        self._front, self._chat = front, chat

    async def __call__(self, call: Call) -> None:
        """Answer one request."""
        fields = parse_json(await call.body(self._front.settings.max_body_bytes))
        await call.while_connected(self._answer(call, _requests(fields)))

    async def _answer(self, call: Call, requests: list[ChatRequest]) -> None:
        front, first = self._front, requests[0]
        ready = await asyncio.gather(*map(self._chat.prepare, requests))
        prompts, params = [one.prompt for one in ready], ready[0].params
        id_ = f"chatcmpl-{front.name_call(call, first)}"
        choices = await front.submit(first, prompts, params, id_)
        usage = Usage(prompts, choices, front.settings.prompt_tokens_details)
        writer = ChatWriter(front, first, id_, ready[0].model, front.settings.response_role, Prompt([], 0), usage)
        await answer(call, choices, writer, False)


def _requests(fields: Json) -> list[ChatRequest]:
    """A chat for each conversation.

    Raises:
        RequestError: names the field, of a message with its conversation.
    """
    conversations = fields.pop("messages", None)
    if not isinstance(conversations, list) or not conversations:
        raise RequestError("messages must be a list of conversations, and not empty", "messages")
    for name in _NOT_IN_BATCHES:
        if fields.get(name):
            raise RequestError(f"{name} cannot be used in a batch; send single requests", name)
    requests = []
    for i, messages in enumerate(conversations):
        if not isinstance(messages, list):
            raise RequestError(f"messages[{i}] must be a conversation, which is a list of messages", "messages")
        requests.append(parse_fields(ChatRequest, {**fields, "messages": messages}))
    return requests
