"""From the conversation in a request to token ids; shared by chat completions and `/tokenize`."""

from collections.abc import Sequence
from typing import Any

from rayllm.api.front import Front
from rayllm.api.wire import ChatRequest, ChatTemplateFields
from rayllm.errors import RequestError
from rayllm.render.conversation import check_messages


async def render(
    front: Front,
    request: ChatTemplateFields,
    add_special_tokens: bool,
    with_tools: bool = True,
    embeds: Sequence[int] = (),
) -> list[int]:
    """Token ids of the conversation; `with_tools` false leaves its tools out.

    `embeds` are the lengths of what stands in place of marks in its contents; see `rayllm.render.embeds`.

    Raises:
        RequestError: a field or message is wrong, or the template refuses the conversation.
    """
    if request.messages is None:
        raise RequestError("messages is missing", "messages")
    continues = bool(request.continue_final_message)
    generates = (not continues) if request.add_generation_prompt is None else request.add_generation_prompt
    if continues and generates:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; set one", "continue_final_message"
        )
    if request.chat_template is not None and not front.settings.trust_request_chat_template:
        raise RequestError(
            "chat_template in a request is not allowed; start the server with --trust-request-chat-template",
            "chat_template",
        )
    check_messages(request.messages)
    front.sampling.check_text_length(sum(map(_length, request.messages)), "messages")
    options = {
        "add_generation_prompt": generates,
        "continue_final_message": continues,
        "documents": request.documents,
        "chat_template": request.chat_template,
        "chat_template_kwargs": request.chat_template_kwargs,
        "add_special_tokens": add_special_tokens,
        "reasoning_effort": request.reasoning_effort,
        "embeds": list(embeds) or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return await front.service.render_chat(request.messages, (request.tools or None) if with_tools else None, given)


def last_role(request: ChatRequest) -> str:
    """The role of the last message, which has been rendered."""
    assert request.messages
    return str(request.messages[-1]["role"])


def last_text(request: ChatRequest) -> str:
    """The text of the last message, which has been rendered."""
    assert request.messages
    content: Any = request.messages[-1].get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def _length(message: dict[str, Any]) -> int:
    content = message.get("content") or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part if isinstance(part, str) else part.get("text") or "") for part in content)
