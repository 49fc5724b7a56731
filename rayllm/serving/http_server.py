"""`rayllm serve`'s own HTTP servers: uvicorn on a socket that is bound before anything slow begins."""

import asyncio
import contextlib
import errno
import functools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from rayllm.config.serve import HttpSettings
from rayllm.errors import ConfigError
from rayllm.logs import hide_paths
from rayllm.serving.http_protocol import LimitedHttp
from rayllm.serving.tls import Certificates

BACKLOG = 2048
CUT_S = 1
"""Time for answers that were cut to be written, where the shutdown timeout is 0."""


def bind(http: HttpSettings) -> socket.socket:
    """A listening socket at the place that the options name.

    Raises:
        ConfigError: it is taken, or not ours to take.
    """
    if http.uds is not None:
        return _bind_unix(http.uds)
    host = http.host or "0.0.0.0"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, http.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError("--host", f"{host!r} is no address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        option = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ConfigError(option, f"cannot listen on {host}:{http.port}: {error.strerror}", "take another") from None
    return listener


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and not _answers(path):
            os.unlink(path)  # left by a server that was killed
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError("--uds", f"cannot listen on {path}: {error.strerror or error}", "take another path") from None
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """The address to reach a listener by, from this machine."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(name[0], f"[{name[0]}]" if ":" in name[0] else name[0])
    return f"{scheme}://{host}:{name[1]}"


class HttpServer:
    """One uvicorn server in the running event loop."""

    def __init__(self, app: FastAPI, http: HttpSettings, listener: socket.socket) -> None:
        """Not yet answering; see `start`.

        Raises:
            ConfigError: the files for HTTPS cannot be used.
        """
        certificates = None if http.tls is None else Certificates(http.tls)
        config = uvicorn.Config(
            app,
            log_config=None if http.log_config else uvicorn.config.LOGGING_CONFIG,
            log_level=http.log_level,
            access_log=http.access_log,
            loop="none",
            http=functools.partial(LimitedHttp, http.max_head_bytes, http.max_headers),  # type: ignore[arg-type]
            ssl_context_factory=None if certificates is None else lambda *_: certificates.context,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=http.shutdown_timeout_s or CUT_S,
        )
        hide_paths(http.hidden_paths)
        self._server = _Server(config)
        self._listener = listener
        self._certificates = certificates if http.tls is not None and http.tls.refresh else None
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to answer requests."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        if self._certificates is not None:
            self._watch = asyncio.create_task(self._certificates.watch())

    async def stop(self) -> None:
        """Accept no more, let running requests end within the shutdown timeout, and cut the rest."""
        self._server.should_exit = True
        if self._watch is not None:
            self._watch.cancel()
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


class _Server(uvicorn.Server):
    """Signals are the launcher's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
