"""Options of metrics, traces and logs of steps."""

from typing import Any
from urllib.parse import urlsplit

from rayllm.config.hidden_metrics import parse_version
from rayllm.config.option import Kind, Option, State


def _version(value: Any) -> str | None:
    try:
        parse_version(value)
    except ValueError:
        return f"{value!r} is not a version such as 0.1"
    return None


def _url(value: Any) -> str | None:
    try:
        parts = urlsplit(value)
        sound = parts.scheme in ("http", "https", "grpc", "grpcs") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    return None if sound else f"{value!r} is not a URL such as http://HOST:4318 or grpc://HOST:4317"


OBSERVABILITY = (
    Option(
        name="show-hidden-metrics-for-version",
        kind=Kind.STR,
        check=_version,
        help="Show metrics that this version of rayllm or a later one hid, such as 0.1: older names, kept for a while "
        "for dashboards that read them.",
    ),
    Option(
        name="otlp-traces-endpoint",
        kind=Kind.STR,
        check=_url,
        help="OpenTelemetry collector that takes a span for each request: http://HOST:4318, or grpc://HOST:4317. "
        "Needs the extra otel.",
    ),
    Option(
        name="collect-detailed-traces",
        kind=Kind.ENUM,
        choices=(
            "all",
            "model",
            "worker",
            "None",
            "model,worker",
            "model,all",
            "worker,model",
            "worker,all",
            "all,model",
            "all,worker",
        ),
        help="Parts of engines whose times spans tell as well: of the model, or of the workers' whole steps. Needs "
        "--otlp-traces-endpoint.",
    ),
    Option(
        name="kv-cache-metrics",
        kind=Kind.BOOL,
        default=False,
        help="Measure how long KV blocks live, lie unused and wait for their next use: three histograms in /metrics. "
        "Needs statistics, that is no --disable-log-stats.",
    ),
    Option(
        name="kv-cache-metrics-sample",
        kind=Kind.FLOAT,
        default=0.01,
        maximum=1.0,
        check=lambda value: None if value > 0 else f"{value} is not above 0",
        help="Share of the KV blocks that --kv-cache-metrics measures, above 0.",
    ),
    Option(
        name="cudagraph-metrics",
        kind=Kind.BOOL,
        state=State.CUDA,
        default=False,
        warns=True,
        help="Measure the use of CUDA graphs.",
    ),
    Option(
        name="enable-layerwise-nvtx-tracing",
        kind=Kind.BOOL,
        state=State.CUDA,
        default=False,
        help="Mark each layer for NVTX.",
    ),
    Option(
        name="enable-mfu-metrics",
        kind=Kind.BOOL,
        default=False,
        help="Estimate floating-point operations and bytes moved by each step, from the model's sizes: three counters "
        "in /metrics, vllm:estimated_*_per_gpu_total.",
    ),
    Option(
        name="enable-logging-iteration-details",
        kind=Kind.BOOL,
        default=False,
        help="Log each step of an engine: requests and tokens of prompts and of outputs, and the time it took.",
    ),
)
