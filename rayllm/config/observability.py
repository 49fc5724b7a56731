"""What the options of metrics and traces come to, and which of them have no effect."""

import importlib.util
import os
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from rayllm.config.engine import ProfilerSettings
from rayllm.config.hidden_metrics import HIDDEN_METRICS, hidden_since
from rayllm.config.registry import Values
from rayllm.config.serve import TraceSettings
from rayllm.errors import ConfigError

GRPC_PORT = 4317
"""OTLP's own, so that a URL with it means gRPC whatever its scheme."""


def kv_metrics_sample(values: Values) -> float:
    """Share of the KV blocks to measure; 0 where they are not."""
    return float(values["kv-cache-metrics-sample"]) if _measures_blocks(values) else 0.0


def shown_metrics(values: Values) -> dict[str, str]:
    """Older names of metrics to show, each with what it is called now."""
    version = values["show-hidden-metrics-for-version"]
    return {} if version is None else hidden_since(version)


def trace_settings(values: Values) -> TraceSettings | None:
    """How requests are traced, or None.

    Raises:
        ConfigError: detailed traces are asked for, and nobody to send them to is named.
    """
    url, details = values["otlp-traces-endpoint"], values["collect-detailed-traces"]
    if url is None:
        if details is not None:
            raise ConfigError(
                "--collect-detailed-traces",
                "there is nobody to send traces to",
                "name a collector with --otlp-traces-endpoint, or leave it out",
            )
        return None
    endpoint, protocol = _endpoint(url)
    parts = details.split(",") if details else []
    return TraceSettings(
        endpoint=endpoint,
        protocol=protocol,
        model="model" in parts or "all" in parts,
        worker="worker" in parts or "all" in parts,
    )


def profiler_settings(values: Values) -> ProfilerSettings | None:
    """How workers are profiled on request, or None.

    Raises:
        ConfigError: a key has a value that cannot be honoured.
    """
    given = values["profiler-config"]
    if given["profiler"] is None:
        return None
    if given["profiler"] != "torch":
        raise ConfigError("--profiler-config.profiler", f"{given['profiler']!r} is not supported", "choose torch")
    if not given["torch_profiler_dir"]:
        raise ConfigError("--profiler-config.torch_profiler_dir", "is missing", "name a folder for the traces")
    least = {"delay": 0, "max": 0, "wait": 0, "warmup": 0, "active": 1}
    for name, minimum in least.items():
        if given[f"{name}_iterations"] < minimum:
            raise ConfigError(f"--profiler-config.{name}_iterations", f"must be at least {minimum}")
    return ProfilerSettings(
        folder=os.path.abspath(given["torch_profiler_dir"]),
        stack=given["torch_profiler_with_stack"],
        flops=given["torch_profiler_with_flops"],
        gzip=given["torch_profiler_use_gzip"],
        shapes=given["torch_profiler_record_shapes"],
        memory=given["torch_profiler_with_memory"],
        **{f"{name}_iterations": given[f"{name}_iterations"] for name in least},
    )


def check_trace_packages(settings: TraceSettings | None) -> None:
    """Refuse traces where the packages are missing that send them.

    Raises:
        ConfigError: names the package.
    """
    if settings is None:
        return
    package = f"opentelemetry.exporter.otlp.proto.{settings.protocol}"
    try:
        found = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        name = f"opentelemetry-exporter-otlp-proto-{settings.protocol}"
        raise ConfigError(
            "--otlp-traces-endpoint", f"the package {name} is not installed", "pip install 'rayllm[otel]'"
        )


def _endpoint(url: str) -> tuple[str, Literal["http", "grpc"]]:
    parts = urlsplit(url)
    secure = parts.scheme in ("https", "grpcs")
    if parts.scheme.startswith("grpc") or parts.port == GRPC_PORT:
        return f"{'https' if secure else 'http'}://{parts.netloc}", "grpc"
    return (url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/traces"), "http"


def observability_notes(values: Values) -> Iterator[str]:
    """Warnings about given options without effect."""
    if values["kv-cache-metrics"] and not _measures_blocks(values):
        yield "--kv-cache-metrics has no effect: --disable-log-stats turns the statistics off that it needs"
    if "kv-cache-metrics-sample" in values.given and not values["kv-cache-metrics"]:
        yield "--kv-cache-metrics-sample has no effect without --kv-cache-metrics"
    profiler = values["profiler-config"]
    if profiler["profiler"] is None and "profiler-config" in values.given:
        yield "--profiler-config has no effect: it names no profiler; choose torch"
    if profiler["profiler"] is not None and not profiler["ignore_frontend"]:
        yield "--profiler-config profiles engines only: HTTP processes run no torch (ignore_frontend says the same)"
    if (version := values["show-hidden-metrics-for-version"]) is not None and not shown_metrics(values):
        versions = sorted({one.hidden_since for one in HIDDEN_METRICS.values()})
        yield (
            f"--show-hidden-metrics-for-version has no effect: {version} and later versions hid no metric of "
            f"rayllm's; those that did: {', '.join(versions)}"
        )


def _measures_blocks(values: Values) -> bool:
    return bool(values["kv-cache-metrics"] and not values["disable-log-stats"])
