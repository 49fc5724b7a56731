"""`rayllm serve --grpc`'s own servers: gRPC on a place that is held before anything slow begins."""

import asyncio
import os
import socket
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rayllm.api.middleware import App
from rayllm.config.serve import HttpSettings
from rayllm.grpc.rayllm_pb2 import DESCRIPTOR
from rayllm.grpc.rayllm_pb2_grpc import add_LLMServicer_to_server
from rayllm.grpc.servicer import Servicer
from rayllm.grpc.tls import credentials
from rayllm.serving.http_server import CUT_S, bind

SERVICE = DESCRIPTOR.services_by_name["LLM"].full_name
HEALTH_EVERY_S = 0.5
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def reserve(http: HttpSettings) -> socket.socket:
    """A socket that holds the port that the options name, for gRPC servers, which listen on sockets of their own.

    A Unix domain socket is checked, and cannot be held.

    Raises:
        ConfigError: the place is taken, or not ours to take.
    """
    # First without SO_REUSEPORT, by which we would share the port with another server of this user.
    with bind(http) as probe:
        family, address = probe.family, probe.getsockname()
    held = socket.socket(family)
    if http.uds is not None:
        os.unlink(http.uds)
        return held
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(address)
    return held


class GrpcServer:
    """One gRPC server in the running event loop: `rayllm.v1.LLM`, health and reflection."""

    def __init__(
        self, app: App, healthy: Callable[[], str | None], http: HttpSettings, max_bytes: int, held: socket.socket
    ) -> None:
        """`healthy` says why requests cannot be served, or None; requests have `max_bytes` at most."""
        self._healthy, self._http = healthy, http
        self._servicer, self._health = Servicer(app), health.aio.HealthServicer()
        options = [("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", max_bytes)]
        self._server = grpc.aio.server(options=options)
        add_LLMServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        if http.tls is None:
            self._server.add_insecure_port(_address(http, held))
        else:
            self._server.add_secure_port(_address(http, held), credentials(http.tls))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to answer RPCs."""
        self._task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        """Accept no more, let running RPCs end within the shutdown timeout, and cut the rest."""
        if self._task is not None:
            self._task.cancel()
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self._server.stop(self._http.shutdown_timeout_s or CUT_S))
        idle = asyncio.create_task(self._servicer.idle.wait())
        await asyncio.wait([stopping, idle], return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        # Time for the last answers to be written. Those who watch health would have us wait for nothing.
        await asyncio.wait([stopping], timeout=CUT_S)
        await self._server.stop(None)
        await stopping

    async def _serve(self) -> None:
        await self._server.start()
        while True:
            status = SERVING if self._healthy() is None else NOT_SERVING
            for service in ("", SERVICE):
                await self._health.set(service, status)
            await asyncio.sleep(HEALTH_EVERY_S)


def _address(http: HttpSettings, held: socket.socket) -> str:
    if http.uds is not None:
        return f"unix:{http.uds}"
    host, port = held.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
