"""The HTTP app. The same app serves under `rayllm serve` and inside a Serve ingress deployment."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rayllm import __version__
from rayllm.api.anthropic import Messages
from rayllm.api.batch_chat import BatchChat
from rayllm.api.call import Call, Endpoint
from rayllm.api.chat import Chat
from rayllm.api.completions import Completions
from rayllm.api.control import Control
from rayllm.api.describe import TOKENIZER_INFO, openapi_document
from rayllm.api.docs import offline_docs
from rayllm.api.elastic import Elastic
from rayllm.api.errors import reply_to_status
from rayllm.api.front import Front
from rayllm.api.generate import Generate, Rendering
from rayllm.api.info import Info
from rayllm.api.middleware import RequestId, RequireKey, RootPath, import_middleware
from rayllm.api.responses import Responses
from rayllm.api.service import Service
from rayllm.api.tokens import Tokens
from rayllm.api.tool_servers import connect
from rayllm.config.serve import FrontendSettings
from rayllm.render.renderer import Renderer

NAME = "rayllm"
Handler = Callable[[Call], Awaitable[None]]


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The description of our routes, which FastAPI cannot derive: they read requests themselves."""
        return openapi_document(any(getattr(route, "path", None) in TOKENIZER_INFO for route in self.routes))


def build_app(service: Service, settings: FrontendSettings, renderer: Renderer) -> FastAPI:
    """The app that answers requests with `service`.

    `renderer` turns the engine's tokens into text in this process; prompts are rendered by `service`.

    Raises:
        ConfigError: a middleware cannot be imported, or a tool server does not answer.
    """
    front = Front(service, settings, renderer)
    app = _app(settings.docs)
    for method, path, handler in _routes(front):
        app.router.routes.append(Route(path, Endpoint(handler, settings.log_error_stack), methods=[method]))
    app.add_exception_handler(HTTPException, _refuse)
    if settings.api_keys:
        app.add_middleware(RequireKey, keys=settings.api_keys)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
    )
    for path in settings.middleware:
        found = import_middleware(path)
        app.add_middleware(found.cls, *found.args, **found.kwargs)
    if settings.request_id_headers:
        app.add_middleware(RequestId)
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)
    return app


def _app(docs: str) -> FastAPI:
    if docs == "online":
        return _App(title=NAME, version=__version__)
    if docs == "off":
        return _App(title=NAME, version=__version__, openapi_url=None)
    app = _App(title=NAME, version=__version__, docs_url=None, redoc_url=None)
    assert app.openapi_url is not None
    app.router.routes.extend(offline_docs(NAME, app.openapi_url))
    return app


def _routes(front: Front) -> list[tuple[str, str, Handler]]:
    info, tokens, chat = Info(front), Tokens(front), Chat(front)
    completions = Completions(front)
    rendering = Rendering(front, chat, completions)
    messages = Messages(front, chat, rendering)
    responses = Responses(front, chat, rendering, connect(front.settings.tool_servers))
    control = Control(front)
    elastic = Elastic(front)
    scaling = [("POST", "/scale_elastic_ep", elastic.scale), ("POST", "/is_scaling_elastic_ep", elastic.is_scaling)]
    profiling = [("POST", "/start_profile", info.start_profile), ("POST", "/stop_profile", info.stop_profile)]
    return [
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/chat/completions/batch", BatchChat(front, chat)),
        ("POST", "/v1/chat/completions/render", rendering.chat),
        ("POST", "/v1/completions/render", rendering.completions),
        ("POST", "/v1/messages/render", messages.render),
        ("POST", "/v1/responses/render", responses.render),
        ("GET", "/v1/chat/completions", chat.stored.list),
        ("GET", "/v1/chat/completions/{id}", chat.stored.retrieve),
        ("POST", "/v1/chat/completions/{id}", chat.stored.update),
        ("DELETE", "/v1/chat/completions/{id}", chat.stored.delete),
        ("GET", "/v1/chat/completions/{id}/messages", chat.stored.messages),
        ("POST", "/inference/v1/generate", Generate(front)),
        ("POST", "/v1/responses", responses.create),
        ("POST", "/v1/responses/input_tokens", responses.count),
        ("GET", "/v1/responses/{id}", responses.retrieve),
        ("DELETE", "/v1/responses/{id}", responses.delete),
        ("POST", "/v1/responses/{id}/cancel", responses.cancel),
        ("GET", "/v1/responses/{id}/input_items", responses.input_items),
        ("POST", "/v1/messages", messages.create),
        ("POST", "/v1/messages/count_tokens", messages.count_tokens),
        ("GET", "/v1/models", info.models),
        ("GET", "/v1/models/{id:path}", info.model),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
        ("GET", "/health", info.health),
        ("GET", "/ping", info.health),
        ("POST", "/ping", info.health),
        ("GET", "/version", info.version),
        ("GET", "/load", info.load),
        ("GET", "/metrics", info.metrics),
        ("POST", "/inference/v1/abort_requests", control.abort_requests),
        *(control.routes() if front.settings.dev_mode else ()),
        *(scaling if front.settings.elastic else ()),
        *(profiling if front.settings.profiling else ()),
        *([("GET", path, info.tokenizer) for path in TOKENIZER_INFO] if front.settings.tokenizer_info else []),
    ]


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that no route takes, such as by 404 or 405."""
    assert isinstance(error, HTTPException)
    reply = reply_to_status(error.status_code, f"{error.detail}: {request.method} {request.url.path}")
    return JSONResponse(reply.body(), reply.status, headers=error.headers)
