"""The OpenAPI document of the app, for `/docs` and generators of clients."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rayllm import __version__
from rayllm.api.anthropic_request import CountTokensRequest, MessagesRequest
from rayllm.api.batch_chat import BatchChatRequest
from rayllm.api.control import AbortRequest
from rayllm.api.generate import GenerateRequest
from rayllm.api.responses_request import PASSED, InputTokensRequest, ResponsesRequest
from rayllm.api.stored_chats import ChatUpdate
from rayllm.api.wire import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

TOKENIZER_INFO = ("/tokenizer_info", "/get_tokenizer_info")
"""One endpoint under its newer and its older name, served only where an option asks for it."""

_BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/v1/chat/completions/{id}": (ChatUpdate, "Give a stored one other metadata"),
    "/v1/completions": (CompletionRequest, "Go on with a text"),
    "/v1/chat/completions/batch": (BatchChatRequest, "Answer several conversations"),
    "/v1/chat/completions/render": (ChatRequest, "The tokens of a conversation, for /inference/v1/generate"),
    "/v1/messages/render": (MessagesRequest, "The tokens of a conversation, for /inference/v1/generate"),
    "/v1/responses/render": (ResponsesRequest, "The tokens of an input, for /inference/v1/generate"),
    "/v1/completions/render": (CompletionRequest, "The tokens of texts, for /inference/v1/generate"),
    "/inference/v1/generate": (GenerateRequest, "Tokens that follow tokens"),
    "/inference/v1/abort_requests": (AbortRequest, "End requests with what they have so far"),
    "/v1/responses": (ResponsesRequest, "Answer an input, in turns that the server keeps"),
    "/v1/responses/input_tokens": (InputTokensRequest, "The number of its tokens"),
    "/v1/messages": (MessagesRequest, "Answer a conversation, as Anthropic has it"),
    "/v1/messages/count_tokens": (CountTokensRequest, "The number of its tokens"),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeRequest, "The text of token ids"),
}
_GETS = {
    "/v1/chat/completions": "Those that are stored",
    "/v1/chat/completions/{id}": "A stored one",
    "/v1/chat/completions/{id}/messages": "The messages that led to it",
    "/v1/models": "The models that are served",
    "/v1/models/{id}": "One of them",
    "/v1/responses/{id}": "A stored response",
    "/v1/responses/{id}/input_items": "The items that led to it",
    "/health": "Whether requests can be served",
    "/ping": "Whether requests can be served",
    "/version": "The version of this software",
    "/load": "Requests that run or wait",
    "/metrics": "Metrics in Prometheus' text format",
}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def openapi_document(tokenizer_info: bool = False) -> dict[str, Any]:
    """The document. Requests are described by their schemas, answers by the API that they follow.

    `tokenizer_info` says that there is `/tokenizer_info`.
    """
    kinds = [kind for kind, _ in _BODIES.values()]
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    chat, responses = (schemas["$defs"][name]["properties"] for name in ("ChatRequest", "ResponsesRequest"))
    responses.update({name: chat[name] for name in PASSED if name in chat})
    paths: dict[str, Any] = {path: {"get": _operation(summary)} for path, summary in _GETS.items()}
    if tokenizer_info:
        for path in TOKENIZER_INFO:
            paths[path] = {"get": _operation("The tokenizer's settings and the chat template")}
    for path in ("/v1/responses/{id}", "/v1/chat/completions/{id}"):
        paths[path]["delete"] = _operation("Forget it")
    paths["/v1/responses/{id}/cancel"] = {"post": _operation("End a background response")}
    for path, (kind, summary) in _BODIES.items():
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})["post"] = {**_operation(summary), "requestBody": body}
    for path, methods in paths.items():
        if "{id}" in path:
            for operation in methods.values():
                operation["parameters"] = [_ID]
    info = {"title": "rayllm", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas["$defs"]}}


def _operation(summary: str) -> dict[str, Any]:
    error = {"description": "Refused: an object `error` with message, type, param and code"}
    return {"summary": summary, "responses": {"200": {"description": "OK"}, "default": error}}
