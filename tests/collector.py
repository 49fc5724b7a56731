"""A stub of an OpenTelemetry collector, on 127.0.0.1."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

WAIT_S = 20.0


class Collector:
    """The spans that came, as protobuf messages."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Any] = []
        self.services: set[str] = set()

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep what an exporter sent."""
        for of_resource in request.resource_spans:
            self.services.add(attributes(of_resource.resource)["service.name"])
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans

    def wait(self, count: int) -> list[Any]:
        """The spans, once there are so many."""
        return self.wait_for(lambda span: True, count)

    def wait_for(self, wanted: Callable[[Any], bool], count: int = 1) -> list[Any]:
        """The spans that are wanted, once there are so many."""
        end = time.monotonic() + WAIT_S
        while len(found := [span for span in self.spans if wanted(span)]) < count:
            assert time.monotonic() < end, f"{len(found)} of {count} spans came"
            time.sleep(0.01)
        return found


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(item) for item in value.array_value.values]
        return getattr(value, kind)

    return {pair.key: plain(pair.value) for pair in message.attributes}


@contextlib.contextmanager
def http_collector() -> Iterator[Collector]:
    """One that speaks OTLP over HTTP."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield collector
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def grpc_collector() -> Iterator[Collector]:
    """One that speaks OTLP over gRPC."""
    collector = Collector()

    class Servicer(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            collector.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Servicer(), server)
    collector.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(None).wait()
