"""From option values, the model's facts and the machine to the frozen settings of engines and service. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rayllm.config.engine import EngineConfig
from rayllm.config.files import Files
from rayllm.config.hardware import Hardware
from rayllm.config.model_facts import ModelFacts
from rayllm.config.observability import (
    kv_metrics_sample,
    observability_notes,
    profiler_settings,
    shown_metrics,
    trace_settings,
)
from rayllm.config.registry import Values, registry
from rayllm.config.serve import FrontendSettings, HttpSettings, RequestLogSettings, ServeSettings, TlsSettings
from rayllm.config.weights import resolve_weights, weight_notes
from rayllm.errors import ConfigError

DTYPE_NAMES = {"half": "float16", "float": "float32"}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_BLOCK_SIZE = 16
DEFAULT_STEPS = {"interactivity": (128, 64), "balanced": (512, 256), "throughput": (2048, 1024)}
"""Tokens and requests of a step on a CPU, by --performance-mode.

Every request waits for the whole step, whose time grows with its tokens: 512 keep it below a second or so, and products
are near their best speed; a quarter keeps others waiting a quarter as long, at the price of reading the weights four
times as often for a long prompt; four times as many read them least.
"""
LONG_SHARE = 0.04
"""Of --max-model-len: a longer prompt is long, where --long-prefill-token-threshold does not say otherwise."""
AUTO_MARGIN = 0.8
"""What --max-model-len auto counts on of the memory free now: Ray and the service come up before the engine."""
CPU_MEMORY_SHARE = 0.4
"""Share of a host's free memory that goes to KV at the default --gpu-memory-utilization; other values scale it."""
NEED_TOKENIZER = (
    "tokenizer",
    "chat-template",
    "chat-template-content-format",
    "trust-request-chat-template",
    "default-chat-template-kwargs",
    "enable-tokenizer-info-endpoint",
)
SAMPLING_DEFAULTS = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "max_tokens",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""What --override-generation-config may hold, beside `max_new_tokens`, the generation config's name of `max_tokens`."""


HTTP_ONLY = (
    "enable-server-load-tracking",
    "enable-tokenizer-info-endpoint",
    "uvicorn-log-level",
    "disable-uvicorn-access-log",
    "disable-access-log-for-endpoints",
    "allow-credentials",
    "allowed-origins",
    "allowed-methods",
    "allowed-headers",
    "ssl-ciphers",
    "root-path",
    "middleware",
    "disable-fastapi-docs",
    "h11-max-incomplete-event-size",
    "h11-max-header-count",
    "enable-offline-docs",
)
"""Options that a gRPC server cannot honour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A service, ready to be started."""

    engine: EngineConfig
    serve: ServeSettings
    notes: tuple[str, ...] = ()
    """What the user should know: options without effect, or that are about to go."""
    plan: tuple[str, ...] = ()
    """What was decided and why, in words."""


def resolve(
    values: Values, facts: ModelFacts, hardware: Hardware, files: Files, api_key: str | None = None
) -> Resolved:
    """Decide everything that options leave open.

    `api_key` is one more key beside those of `--api-key`.

    Raises:
        ConfigError: options contradict one another, the model or the machine.
    """
    engine = resolve_engine(values, facts, hardware, files)
    serve = _resolve_serve(values, facts, engine, files, api_key)
    return Resolved(engine=engine, serve=serve, notes=(*weight_notes(values, facts), *_notes(values)))


def resolve_engine(
    values: Values, facts: ModelFacts, hardware: Hardware, files: Files | None = None
) -> EngineConfig:
    """The settings of each engine.

    Raises:
        ConfigError: options contradict one another, the model or the machine.
    """
    files = files or Files()
    engines = values["data-parallel-size"]
    dtype = _dtype(values["dtype"], facts)
    block_size = values["block-size"] or DEFAULT_BLOCK_SIZE
    if DEFAULT_BLOCK_SIZE % block_size and block_size % DEFAULT_BLOCK_SIZE:
        raise ConfigError("--block-size", f"{block_size} is no divisor and no multiple of 16", "choose 16 or 32")
    share = CPU_MEMORY_SHARE * values["gpu-memory-utilization"] / 0.92
    blocks = values["num-gpu-blocks-override"]
    # With no size given, weights and KV come out of the same free memory.
    kv_free = int(AUTO_MARGIN * share * max(0, hardware.memory / engines - files.weight_bytes))
    max_model_len = _max_model_len(values, facts, dtype, block_size, kv_free)
    if blocks is not None and blocks * block_size < max_model_len:
        raise ConfigError(
            "--num-gpu-blocks-override",
            f"{blocks} blocks of {block_size} tokens cannot hold a request of {max_model_len} tokens",
            f"raise it, or lower --max-model-len to {blocks * block_size}",
        )
    return EngineConfig(
        model=facts,
        dtype=dtype,
        device="cpu",
        attention_backend=values["attention-backend"] or "auto",
        weights=resolve_weights(values, facts, hardware, files),
        max_model_len=max_model_len,
        max_num_seqs=values["max-num-seqs"] or DEFAULT_STEPS[values["performance-mode"]][1],
        max_num_batched_tokens=_batched_tokens(values, max_model_len),
        block_size=block_size,
        kv_cache_memory_bytes=values["kv-cache-memory-bytes"],
        num_blocks=blocks,
        memory_share=min(share, 0.9),
        memory_share_given="gpu-memory-utilization" in values.given,
        engines_on_host=engines,
        enable_prefix_caching=values["enable-prefix-caching"] is not False,
        scheduling_policy=values["scheduling-policy"],
        async_scheduling=values["async-scheduling"] is not False,
        threads=max(1, hardware.cpus // engines),
        logits_processors=tuple(_class_path("--logits-processors", name) for name in values["logits-processors"] or ()),
        seed=values["seed"],
        kv_metrics_sample=kv_metrics_sample(values),
        estimate_work=values["enable-mfu-metrics"],
        weight_bytes=files.weight_bytes,
        profiler=profiler_settings(values),
        log_iterations=values["enable-logging-iteration-details"],
        chunked_prefill=values["enable-chunked-prefill"] is not False,
        max_partial_prefills=values["max-num-partial-prefills"],
        max_long_partial_prefills=values["max-long-partial-prefills"],
        long_prefill_tokens=_long_prefill_tokens(values, max_model_len),
        reserve_whole_prompt=values["scheduler-reserve-full-isl"],
        prefix_hash=values["prefix-caching-hash-algo"],
        worker_cls=None if values["worker-cls"] == "auto" else _class_path("--worker-cls", values["worker-cls"]),
        worker_extension_cls=_optional_class("--worker-extension-cls", values["worker-extension-cls"]),
        logprobs_mode=values["logprobs-mode"],
        stream_interval=values["stream-interval"],
        scheduler_cls=_optional_class("--scheduler-cls", values["scheduler-cls"]),
    )


def _batched_tokens(values: Values, max_model_len: int) -> int:
    wanted, usual = values["max-num-batched-tokens"], DEFAULT_STEPS[values["performance-mode"]][0]
    if values["enable-chunked-prefill"] is not False:
        return wanted or usual
    if wanted is not None and wanted < max_model_len:
        raise ConfigError(
            "--max-num-batched-tokens",
            f"{wanted} tokens in a step do not hold a request of {max_model_len} tokens, and "
            "--no-enable-chunked-prefill forbids to cut it",
            f"raise it, lower --max-model-len to {wanted}, or allow chunks",
        )
    return wanted or max(usual, max_model_len)


def _long_prefill_tokens(values: Values, max_model_len: int) -> int:
    """From how many tokens on a prompt is long, after the limits on prompts in pieces were checked."""
    partial, long = values["max-num-partial-prefills"], values["long-prefill-token-threshold"]
    if partial > 1 and values["enable-chunked-prefill"] is False:
        raise ConfigError(
            "--max-num-partial-prefills", "prompts in pieces need chunked prefill", "drop --no-enable-chunked-prefill"
        )
    if values["max-long-partial-prefills"] > partial:
        raise ConfigError(
            "--max-long-partial-prefills",
            f"{values['max-long-partial-prefills']} is more than --max-num-partial-prefills, {partial}",
            "lower it, or raise the other",
        )
    if long > max_model_len:
        raise ConfigError(
            "--long-prefill-token-threshold", f"{long} is more than --max-model-len, {max_model_len}", "lower it"
        )
    return long or int(LONG_SHARE * max_model_len)


def _notes(values: Values) -> Iterator[str]:
    yield from observability_notes(values)
    yield from _without_effect(values)
    if values["long-prefill-token-threshold"] and values["max-num-partial-prefills"] == 1:
        yield (
            "--long-prefill-token-threshold has no effect: only one prompt at a time is computed in pieces; "
            "raise --max-num-partial-prefills"
        )


def _resolve_serve(
    values: Values, facts: ModelFacts, engine: EngineConfig, files: Files, api_key: str | None
) -> ServeSettings:
    names = tuple(values["served-model-name"] or (values["model"],))
    if not all(names):
        raise ConfigError("--served-model-name", "holds an empty name", "give a name, or leave it out")
    _check_tokenizer_options(values)
    tokens_only = values["tokens-only"] or values["skip-tokenizer-init"]
    frontend = FrontendSettings(
        model_path=facts.path,
        served_model_names=names,
        tokenizer_path=None if values["skip-tokenizer-init"] else files.tokenizer or facts.path,
        max_model_len=engine.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        generation_defaults=_generation_defaults(values, facts, files),
        chat_template=files.chat_template,
        chat_template_kwargs=values["default-chat-template-kwargs"] or {},
        content_format=values["chat-template-content-format"],
        response_role=values["response-role"],
        max_logprobs=values["max-logprobs"],
        force_usage=values["enable-force-include-usage"],
        prompt_tokens_details=values["enable-prompt-tokens-details"],
        api_keys=(*(values["api-key"] or ()), *((api_key,) if api_key else ())),
        allowed_origins=tuple(values["allowed-origins"]),
        allowed_methods=tuple(values["allowed-methods"]),
        allowed_headers=tuple(values["allowed-headers"]),
        allow_credentials=values["allow-credentials"],
        root_path=_root_path(values),
        middleware=tuple(values["middleware"]),
        docs=_docs(values),
        seed=values["seed"],
        trust_request_chat_template=values["trust-request-chat-template"],
        request_id_headers=values["enable-request-id-headers"],
        tokens_as_token_ids=values["return-tokens-as-token-ids"] or tokens_only,
        tokens_only=tokens_only,
        render_workers=values["renderer-num-workers"],
        request_log=_request_log(values),
        log_error_stack=values["log-error-stack"],
        load_tracking=values["enable-server-load-tracking"],
        tokenizer_info=values["enable-tokenizer-info-endpoint"],
        priority_scheduling=engine.scheduling_policy == "priority",
        shown_metrics=shown_metrics(values),
        traces=trace_settings(values),
        profiling=engine.profiler is not None,
    )
    if values["grpc"]:
        _check_grpc(values)
    logs_as_told = files.log_config is not None and "uvicorn-log-level" not in values.given
    http = HttpSettings(
        grpc=values["grpc"],
        host=values["host"],
        port=values["port"],
        uds=values["uds"],
        servers=values["api-server-count"] or values["data-parallel-size"],
        tls=_tls(values),
        log_level=None if logs_as_told else values["uvicorn-log-level"],
        log_config=files.log_config is not None,
        access_log=not values["disable-uvicorn-access-log"],
        hidden_paths=_hidden_paths(values),
        max_head_bytes=values["h11-max-incomplete-event-size"],
        max_headers=values["h11-max-header-count"],
        shutdown_timeout_s=values["shutdown-timeout"],
    )
    return ServeSettings(
        frontend=frontend,
        http=http,
        engines=values["data-parallel-size"],
        log_stats=not values["disable-log-stats"],
        aggregate_stats=values["aggregate-engine-logging"],
        log_config=files.log_config,
    )


def _root_path(values: Values) -> str:
    path = (values["root-path"] or "").rstrip("/")
    if path and not path.startswith("/"):
        raise ConfigError("--root-path", f"{path!r} does not begin with a slash", f"write /{path}")
    return path


def _docs(values: Values) -> str:
    if not values["disable-fastapi-docs"]:
        return "offline" if values["enable-offline-docs"] else "online"
    if values["enable-offline-docs"]:
        raise ConfigError("--enable-offline-docs", "contradicts --disable-fastapi-docs", "leave one of them out")
    return "off"


def _hidden_paths(values: Values) -> frozenset[str]:
    """As clients and as the proxy in front may write them."""
    given = values["disable-access-log-for-endpoints"] or ()
    paths = [f"/{path.removeprefix('/')}" for path in given]
    return frozenset(prefix + path for path in paths for prefix in ("", _root_path(values)))


def _tls(values: Values) -> TlsSettings | None:
    if values["ssl-certfile"] is None:
        for name in ("ssl-keyfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers", "enable-ssl-refresh"):
            if values[name]:
                raise ConfigError(f"--{name}", "is for HTTPS, which needs a certificate", "give --ssl-certfile")
        return None
    if values["ssl-cert-reqs"] and values["ssl-ca-certs"] is None:
        raise ConfigError("--ssl-cert-reqs", "clients' certificates are checked with others", "give --ssl-ca-certs")
    if values["ssl-ca-certs"] is not None and not values["ssl-cert-reqs"]:
        raise ConfigError(
            "--ssl-ca-certs", "is not used while no client is asked for a certificate", "give --ssl-cert-reqs 1 or 2"
        )
    return TlsSettings(
        certfile=values["ssl-certfile"],
        keyfile=values["ssl-keyfile"],
        ca_certs=values["ssl-ca-certs"],
        cert_reqs=values["ssl-cert-reqs"],
        ciphers=values["ssl-ciphers"],
        refresh=values["enable-ssl-refresh"],
    )


def _check_grpc(values: Values) -> None:
    for name in HTTP_ONLY:
        if name in values.given and values[name] != registry()[name].default:
            raise ConfigError(f"--{name}", "is for HTTP, which --grpc replaces", "leave out one of them")
    if values["ssl-cert-reqs"] == 1:
        raise ConfigError("--ssl-cert-reqs", "gRPC servers check all clients or none", "give 0 or 2")
    if values["uds"] is not None and (values["api-server-count"] or values["data-parallel-size"]) > 1:
        raise ConfigError("--uds", "gRPC servers cannot share a socket", "set --api-server-count 1, or leave it out")


def _check_tokenizer_options(values: Values) -> None:
    if not values["skip-tokenizer-init"]:
        return
    for name in NEED_TOKENIZER:
        if values[name] not in (None, False, "auto"):
            raise ConfigError(f"--{name}", "needs a tokenizer, and --skip-tokenizer-init loads none", "leave one out")


def _request_log(values: Values) -> RequestLogSettings | None:
    if not values["enable-log-requests"]:
        if values["enable-log-outputs"]:
            raise ConfigError("--enable-log-outputs", "needs --enable-log-requests", "give both")
        return None
    return RequestLogSettings(
        outputs=values["enable-log-outputs"],
        deltas=values["enable-log-deltas"],
        max_prompt_length=values["max-log-len"],
    )


def _without_effect(values: Values) -> Iterator[str]:
    """Notes about options that the others leave nothing to do."""
    for option, without in (
        ("max-log-len", "enable-log-requests"),
        ("enable-log-deltas", "enable-log-outputs"),
    ):
        if option in values.given and not values[without]:
            yield f"--{option} has no effect without --{without}"
    if values["aggregate-engine-logging"] and values["disable-log-stats"]:
        yield "--aggregate-engine-logging has no effect with --disable-log-stats"


def _dtype(wanted: str, facts: ModelFacts) -> str:
    if wanted != "auto":
        return DTYPE_NAMES.get(wanted, wanted)
    # A CPU has bfloat16 products and hardly any for float16; the range of bfloat16 covers that of float16.
    return "bfloat16" if facts.dtype == "float16" else facts.dtype


def _max_model_len(values: Values, facts: ModelFacts, dtype: str, block_size: int, free: int) -> int:
    wanted = values["max-model-len"]
    if wanted is None:
        return facts.max_model_len
    if wanted > facts.max_model_len:
        raise ConfigError(
            "--max-model-len",
            f"{wanted} is more than the {facts.max_model_len} tokens that the model's positions allow",
            "lower it",
        )
    if wanted != -1:
        return int(wanted)
    if values["num-gpu-blocks-override"] is not None:
        fits = values["num-gpu-blocks-override"] * block_size
    else:
        size = values["kv-cache-memory-bytes"] or free
        fits = size // (kv_bytes_per_token(facts, dtype) * block_size) * block_size
    if fits < 1:
        raise ConfigError("--max-model-len", "no length fits into the KV cache", "give --kv-cache-memory-bytes")
    return min(facts.max_model_len, int(fits))


def kv_bytes_per_token(facts: ModelFacts, dtype: str) -> int:
    """Bytes of keys and values of one token over all layers (an upper bound where layers have windows)."""
    config = facts.config
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * int(config["num_hidden_layers"]) * int(heads) * int(head_size) * DTYPE_BYTES[dtype]


def _generation_defaults(values: Values, facts: ModelFacts, files: Files) -> dict[str, Any]:
    """Sampling parameters of requests that do not set them. A `max_tokens` among them is a limit of all requests."""
    override = dict(values["override-generation-config"])
    if "max_new_tokens" in override:
        override["max_tokens"] = override.pop("max_new_tokens")
    if unknown := override.keys() - SAMPLING_DEFAULTS:
        known = ", ".join(sorted(SAMPLING_DEFAULTS))
        raise ConfigError("--override-generation-config", f"{min(unknown)!r} has no default here", f"it takes {known}")
    base = facts.generation_defaults if files.generation_config is None else files.generation_config
    return {**base, **override}


def _class_path(option: str, name: str) -> str:
    """`package.module:Class` for either spelling of a qualified name."""
    if ":" in name:
        return name
    module, dot, cls = name.rpartition(".")
    if not dot:
        raise ConfigError(option, f"{name!r} names no module", "write module:Class")
    return f"{module}:{cls}"


def _optional_class(option: str, name: str | None) -> str | None:
    return _class_path(option, name) if name else None
