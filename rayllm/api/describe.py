"""The OpenAPI document of the app, for `/docs` and generators of clients."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rayllm import __version__
from rayllm.api import anthropic_request, generate, responses_request, schemas
from rayllm.api.anthropic_request import CountTokensRequest, MessagesRequest
from rayllm.api.batch_chat import BatchChatRequest
from rayllm.api.control import AbortRequest
from rayllm.api.generate import GenerateRequest
from rayllm.api.responses_request import PASSED, InputTokensRequest, ResponsesRequest
from rayllm.api.stored_chats import ChatUpdate
from rayllm.api.wire import (
    IGNORABLE,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Refusal,
    TokenizeRequest,
    Wire,
)

Json = dict[str, Any]

TOKENIZER_INFO = ("/tokenizer_info", "/get_tokenizer_info")
"""One endpoint under its newer and its older name, served only where an option asks for it."""

_POSTS: Mapping[str, tuple[type[Wire], type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatRequest, schemas.ChatAnswer, "Answer a conversation"),
    "/v1/chat/completions/{id}": (ChatUpdate, schemas.StoredChat, "Give a stored one other metadata"),
    "/v1/completions": (CompletionRequest, schemas.CompletionAnswer, "Go on with a text"),
    "/v1/chat/completions/batch": (BatchChatRequest, schemas.ChatAnswer, "Answer several conversations"),
    "/v1/chat/completions/render": (
        ChatRequest, schemas.RenderedAnswer, "The tokens of a conversation, for /inference/v1/generate",
    ),
    "/v1/messages/render": (
        MessagesRequest, schemas.RenderedAnswer, "The tokens of a conversation, for /inference/v1/generate",
    ),
    "/v1/responses/render": (
        ResponsesRequest, schemas.RenderedAnswer, "The tokens of an input, for /inference/v1/generate",
    ),
    "/v1/completions/render": (
        CompletionRequest, schemas.RenderedAnswers, "The tokens of texts, for /inference/v1/generate",
    ),
    "/inference/v1/generate": (GenerateRequest, schemas.GenerateAnswer, "Tokens that follow tokens"),
    "/inference/v1/abort_requests": (AbortRequest, schemas.AbortAnswer, "End requests with what they have so far"),
    "/v1/responses": (ResponsesRequest, schemas.ResponsesAnswer, "Answer an input, in turns that the server keeps"),
    "/v1/responses/input_tokens": (InputTokensRequest, schemas.InputTokensAnswer, "The number of its tokens"),
    "/v1/messages": (MessagesRequest, schemas.MessagesAnswer, "Answer a conversation, as Anthropic has it"),
    "/v1/messages/count_tokens": (CountTokensRequest, schemas.CountTokensAnswer, "The number of its tokens"),
    "/tokenize": (TokenizeRequest, schemas.TokenizeAnswer, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeRequest, schemas.DetokenizeAnswer, "The text of token ids"),
}  # fmt: skip
_OTHERS: tuple[tuple[str, str, type[BaseModel], str], ...] = (
    ("get", "/v1/chat/completions", schemas.StoredChats, "Those that are stored"),
    ("get", "/v1/chat/completions/{id}", schemas.StoredChat, "A stored one"),
    ("delete", "/v1/chat/completions/{id}", schemas.DeletedChat, "Forget it"),
    ("get", "/v1/chat/completions/{id}/messages", schemas.StoredMessages, "The messages that led to it"),
    ("get", "/v1/models", schemas.ModelList, "The models that are served"),
    ("get", "/v1/models/{id}", schemas.ModelCard, "One of them"),
    ("get", "/v1/responses/{id}", schemas.ResponsesAnswer, "A stored response"),
    ("delete", "/v1/responses/{id}", schemas.DeletedResponse, "Forget it"),
    ("post", "/v1/responses/{id}/cancel", schemas.ResponsesAnswer, "End a background response"),
    ("get", "/v1/responses/{id}/input_items", schemas.InputItems, "The items that led to it"),
    ("get", "/version", schemas.VersionAnswer, "The version of this software"),
    ("get", "/load", schemas.LoadAnswer, "Requests that run or wait"),
)
_PLAIN = {
    "/health": "Whether requests can be served",
    "/ping": "Whether requests can be served",
    "/metrics": "Metrics in Prometheus' text format",
}
_EVENTS: Json = {"text/event-stream": {"schema": {"description": "Server-sent events, whose data is JSON"}}}
_STREAMING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/responses", "/v1/messages"}
)
_REFUSED: Mapping[type[Wire], Mapping[str, Refusal]] = {
    CountTokensRequest: anthropic_request.REFUSED,
    MessagesRequest: anthropic_request.REFUSED,
    GenerateRequest: generate.REFUSED,
    InputTokensRequest: responses_request.REFUSED,
    ResponsesRequest: responses_request.REFUSED,
}
"""Those of other requests are `wire.REFUSED`."""
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_PAGE: Json = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
_QUERIES: Mapping[str, Mapping[str, Json]] = {
    "/v1/chat/completions": {**_PAGE, "model": {"type": "string"}},
    "/v1/chat/completions/{id}/messages": _PAGE,
    "/v1/responses/{id}": {
        "stream": {"type": "boolean"},
        "starting_after": {"type": "integer", "minimum": -1, "maximum": 10**9},
    },
    "/v1/responses/{id}/input_items": _PAGE,
}
"""Parameters of the URL, by the path that GET reads them from."""


def openapi_document(tokenizer_info: bool = False) -> Json:
    """The document: requests, answers and errors, each with its schema.

    `tokenizer_info` says that there is `/tokenizer_info`.
    """
    paths: Json = {}
    for path, (kind, answer, summary) in _POSTS.items():
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        content = _json(answer) | (_EVENTS if path in _STREAMING else {})
        operation = {**_operation(path, summary, content), "requestBody": body}
        if "{id}" in path:
            operation["parameters"] = [_ID]
        paths[path] = {"post": operation}
    for method, path, answer, summary in _OTHERS:
        parameters = [_ID] if "{id}" in path else []
        if method == "get":
            parameters = [*parameters, *_query(path)]
        operation = {**_operation(path, summary, _json(answer)), "parameters": parameters}
        paths.setdefault(path, {})[method] = operation
    for path, summary in _PLAIN.items():
        paths[path] = {"get": _operation(path, summary, {"text/plain": {"schema": {"type": "string"}}})}
    paths["/v1/responses/{id}"]["get"]["responses"]["200"]["content"] |= _EVENTS
    if tokenizer_info:
        shown = {"application/json": {"schema": {"type": "object"}}}
        for path in TOKENIZER_INFO:
            paths[path] = {"get": _operation(path, "The tokenizer's settings and the chat template", shown)}
    info = {"title": "rayllm", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": _schemas()}}


def _operation(path: str, summary: str, content: Json) -> Json:
    error = _json(schemas.MessagesError if path.startswith("/v1/messages") else schemas.Error)
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "OK", "content": content},
            "4XX": {"description": "Refused: the error says why, and which field is to blame", "content": error},
            "5XX": {"description": "It cannot be answered now", "content": error},
        },
    }


def _json(kind: type[BaseModel]) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def _query(path: str) -> list[Json]:
    return [{"name": name, "in": "query", "schema": schema} for name, schema in _QUERIES.get(path, {}).items()]


def _schemas() -> Json:
    requests = {kind for kind, _, _ in _POSTS.values()}
    kinds: list[type[BaseModel]] = [
        *sorted(requests, key=lambda kind: kind.__name__),
        *dict.fromkeys(answer for _, answer, _ in _POSTS.values()),
        *dict.fromkeys(answer for _, _, answer, _ in _OTHERS),
        schemas.Error,
        schemas.MessagesError,
    ]
    _, document = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    found: Json = document["$defs"]
    chat, responses = (found[name]["properties"] for name in ("ChatRequest", "ResponsesRequest"))
    responses.update({name: chat[name] for name in PASSED if name in chat})
    for kind in requests:
        _add_untyped(found[kind.__name__], _REFUSED.get(kind, REFUSED))
    return found


def _add_untyped(schema: Json, refused: Mapping[str, Refusal]) -> None:
    """Add what a request may have beside its fields: those that ask for nothing, and any that is null."""
    neutral = {name: {"enum": [*refusal.neutral, None]} for name, refusal in refused.items()}
    more = {**{name: {} for name in sorted(IGNORABLE)}, **neutral}
    schema["properties"] = {**more, **schema["properties"]}
    schema["additionalProperties"] = {"type": "null"}
