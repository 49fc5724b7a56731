"""Chats whose chunks a test writes itself, as a chat with parsers would send them."""

from types import SimpleNamespace

from rayllm.api.answer import encode
from rayllm.api.chat import BegunChat

ANSWER = (
    {"role": "assistant", "content": ""},
    {"reasoning_content": "Let me ", "reasoning": "Let me "},
    {"reasoning_content": "see.", "reasoning": "see."},
    {"content": "I look "},
    {"content": "it up."},
    {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "add", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    {"tool_calls": [{"index": 1, "id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
)
"""Deltas of an answer with all kinds of parts."""


def chunk(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    return b"data: " + encode({"choices": [choice], "usage": None}) + b"\n\n"


def chunks():
    """`ANSWER` as events."""
    return [*map(chunk, ANSWER), chunk({}, "tool_calls")]


def whole():
    """`ANSWER` as the body of a whole answer."""
    calls = [
        {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    message = {"role": "assistant", "content": "I look it up.", "reasoning_content": "Let me see.", "tool_calls": calls}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls", "stop_reason": None}
    return {"choices": [choice]}


def begun(id_="x-1"):
    """A chat whose pieces are the bytes of its events, and whose whole answer is `whole()`."""
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12, "prompt_tokens_details": None}
    writer = SimpleNamespace(event=lambda choice, piece: piece, whole=lambda pieces: whole())
    return BegunChat([], writer, SimpleNamespace(now=lambda: usage), id_, "tiny")
