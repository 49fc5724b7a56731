"""Endpoints that act on engines: aborts, and what the development mode adds (`RLLM_SERVER_DEV_MODE=1`)."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, get_args

from rayllm import __version__
from rayllm.api.call import Call
from rayllm.api.errors import ErrorReply
from rayllm.api.front import Front
from rayllm.api.parse import parse_request
from rayllm.api.wire import Wire
from rayllm.errors import RayLLMError, RequestError
from rayllm.messages.engine import AbortNamed, CallWorkers, IsPaused, Pause, PauseMode, ResetPrefixCache, Resume

Json = dict[str, Any]


class AbortRequest(Wire):
    """`POST /inference/v1/abort_requests`."""

    request_ids: list[str]


class RpcRequest(Wire):
    """`POST /collective_rpc`."""

    method: str
    args: list[Any] | None = None
    kwargs: Json | None = None
    timeout: float | None = None


class Control:
    """Acts on all engines that serve at the moment; one that starts later is not paused."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def routes(self) -> list[tuple[str, str, Callable[[Call], Awaitable[None]]]]:
        """The endpoints of the development mode."""
        return [
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("POST", "/pause", self.pause),
            ("POST", "/resume", self.resume),
            ("GET", "/is_paused", self.is_paused),
            ("POST", "/collective_rpc", self.collective_rpc),
            ("GET", "/server_info", self.server_info),
        ]

    async def abort_requests(self, call: Call) -> None:
        """End requests, named by the ids in their answers or those they asked for, with what they have so far."""
        request = parse_request(AbortRequest, await call.body(self._front.settings.max_body_bytes))
        ended = await self._front.service.command(AbortNamed(request.request_ids))
        await call.json({"aborted": sum(ended)})

    async def reset_prefix_cache(self, call: Call) -> None:
        """Forget cached prefixes; with `reset_running_requests` those that run compute theirs again."""
        query = _query(call, "reset_running_requests", "reset_external")
        if _flag(query, "reset_external", False):
            raise RequestError("reset_external cannot be used: there is no cache outside the engines", "reset_external")
        await self._front.service.command(ResetPrefixCache(_flag(query, "reset_running_requests", False)))
        await call.json({"success": True})

    async def pause(self, call: Call) -> None:
        """Let no request go on; answered once none moves. `mode` is that of `Pause`."""
        query = _query(call, "mode", "clear_cache")
        mode: Any = query.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise RequestError(f"mode must be one of {', '.join(get_args(PauseMode))}", "mode")
        clear = _flag(query, "clear_cache", True) and mode != "keep"
        await self._front.service.command(Pause(mode))
        if clear:
            await self._front.service.command(ResetPrefixCache())
        await call.json({"status": "paused"})

    async def resume(self, call: Call) -> None:
        """End a pause."""
        await self._front.service.command(Resume())
        await call.json({"status": "resumed"})

    async def is_paused(self, call: Call) -> None:
        """Whether an engine is paused."""
        await call.json({"is_paused": any(await self._front.service.command(IsPaused()))})

    async def collective_rpc(self, call: Call) -> None:
        """Call a method of every worker of every engine."""
        request = parse_request(RpcRequest, await call.body(self._front.settings.max_body_bytes))
        if request.method.startswith("_"):
            raise RequestError("method must be a public one", "method")
        command = CallWorkers(request.method, request.args or [], request.kwargs or {})
        try:
            async with asyncio.timeout(request.timeout):
                answers = await self._front.service.command(command)
        except TimeoutError:
            await call.error(ErrorReply(504, f"{request.method} took longer than {request.timeout:g} s, and goes on"))
        except RequestError:
            raise
        except RayLLMError as error:
            await call.error(ErrorReply(500, str(error)))
        else:
            await call.json({"results": [result for of_engine in answers for result in of_engine]})

    async def server_info(self, call: Call) -> None:
        """The settings of this process, as text or, with `config_format=json`, as an object."""
        form = _query(call, "config_format").get("config_format", "text")
        if form not in ("text", "json"):
            raise RequestError("config_format must be 'text' or 'json'", "config_format")
        settings = dataclasses.asdict(self._front.settings)
        del settings["api_keys"]
        if settings["seed"] >= 1 << 64:  # more than the encoder's integers
            settings["seed"] = str(settings["seed"])
        shown = settings if form == "json" else repr(self._front.settings)
        await call.json({"version": __version__, "rayllm_config": shown})


def _query(call: Call, *known: str) -> dict[str, str]:
    query = call.query()
    for name in query:
        if name not in known:
            raise RequestError(f"unknown parameter {name[:100]!r}; known are {', '.join(known)}", name[:100])
    return query


def _flag(query: dict[str, str], name: str, default: bool) -> bool:
    value = query.get(name, "true" if default else "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise RequestError(f"{name} must be true or false", name)
    return value in ("true", "1")
