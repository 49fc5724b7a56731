"""The servers of `rayllm serve`: HTTP, or gRPC in its place."""

import importlib.util
import socket
from typing import Protocol

from fastapi import FastAPI

from rayllm.api.service import Service
from rayllm.config.serve import HttpSettings, ServeSettings
from rayllm.errors import ConfigError
from rayllm.serving.http_server import HttpServer, bind, url_of

GRPC_PACKAGES = ("grpc", "grpc_health", "grpc_reflection")


class Server(Protocol):
    """One server in the running event loop."""

    def start(self) -> None:
        """Begin to answer requests."""
        ...

    async def stop(self) -> None:
        """Accept no more, let running requests end within the shutdown timeout, and cut the rest."""
        ...


def listen(http: HttpSettings) -> socket.socket:
    """The socket of the place that the options name; all server processes share it.

    Raises:
        ConfigError: it is taken, or gRPC is wanted and not installed.
    """
    if not http.grpc:
        return bind(http)
    for package in GRPC_PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError("--grpc", f"the package {package} is not installed", "pip install 'rayllm[grpc]'")
    from rayllm.grpc.server import reserve

    return reserve(http)


def place_of(http: HttpSettings, listener: socket.socket) -> str:
    """The address to reach the servers by, from this machine: a URL, or what gRPC clients call a target."""
    if not http.grpc:
        return url_of(listener, "http" if http.tls is None else "https")
    return url_of(listener).removeprefix("http://") if http.uds is None else f"unix:{http.uds}"


def make_server(app: FastAPI, service: Service, settings: ServeSettings, listener: socket.socket) -> Server:
    """A server that is yet to be started."""
    if not settings.http.grpc:
        return HttpServer(app, settings.http, listener)
    from rayllm.grpc.server import GrpcServer

    return GrpcServer(app, service.healthy, settings.http, settings.frontend.max_body_bytes, listener)
