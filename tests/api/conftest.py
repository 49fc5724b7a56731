"""The HTTP app over a fake service, in this process."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rayllm.api.app import build_app
from rayllm.api.fake import FakeService, Script
from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.serve import FrontendSettings
from rayllm.render.renderer import Renderer

from ..render.samples import byte_level

MAX_LEN = 64
MODEL = "tiny"


def strict_json(text: str | bytes) -> Any:
    """JSON as RFC 8259 has it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"bare {name}")

    return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, parse_constant=refuse)


class Harness:
    """An app, the fake behind it, and shorthands to call it."""

    def __init__(self, **settings: Any) -> None:
        renderer = Renderer(settings.pop("tokenizer", None) or byte_level())
        self.vocab = renderer.tokenizer.vocab_size
        known = {
            "model_path": "models/tiny",
            "served_model_names": (MODEL, "alias"),
            "tokenizer_path": "models/tiny",
            "max_model_len": MAX_LEN,
            "vocab_size": self.vocab,
            "eos_token_ids": (0,),
        }
        self._build(FrontendSettings(**{**known, **settings}), renderer)

    @classmethod
    def of(cls, *arguments: str) -> "Harness":
        """The app that `rayllm serve ARGUMENTS` would serve."""
        settings = load(parse_arguments(arguments, registry())).serve.frontend
        harness = cls.__new__(cls)
        harness.vocab = settings.vocab_size
        harness._build(settings, Renderer.load(settings))
        return harness

    def _build(self, settings: FrontendSettings, renderer: Renderer) -> None:
        self.renderer, self.tokenizer = renderer, renderer.tokenizer
        self.service = FakeService(renderer)
        self.app = build_app(self.service, settings, renderer)

    def script(self, *texts: str, **more: Any) -> None:
        """Let every choice give these texts, one output each."""
        self.scripts(Script([self.ids(text) for text in texts], **more))

    def scripts(self, *scripts: Script) -> None:
        self.service.scripts[:] = scripts

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **kwargs)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.request("POST", path, json={"model": MODEL, **body})

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", **{"prompt": "hi", **body})


def ok(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    return strict_json(reply.content)


def refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refusal in the documented shape."""
    assert reply.status_code == status, f"{reply.status_code} {reply.text[:400]}"
    assert reply.headers["content-type"] == "application/json"
    body = strict_json(reply.content)
    error = body["error"]
    assert set(body) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    for inside in ("Traceback", ".py", "Error(", "Exception"):
        assert inside not in error["message"]
    return error


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.content.split(b"\n\n")
    assert blocks.pop() == b""
    assert blocks.pop() == b"data: [DONE]"
    return [strict_json(block.removeprefix(b"data: ")) for block in blocks]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


def finish(chunks: list[dict[str, Any]], index: int = 0) -> list[str]:
    """The finish reasons of one choice."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return [c["finish_reason"] for c in choices if c["finish_reason"]]


@pytest.fixture
def api() -> Harness:
    return Harness()


@pytest.fixture
def make_api() -> Callable[..., Harness]:
    return Harness
