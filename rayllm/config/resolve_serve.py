"""From option values to the settings of everything around the engines: HTTP or gRPC servers, rendering, logs."""

import importlib.util
import re
from typing import Any

import msgspec

from rayllm.config.data_parallel import resolve_data_parallel
from rayllm.config.engine import EngineConfig
from rayllm.config.files import Files
from rayllm.config.model_facts import ModelFacts
from rayllm.config.observability import shown_metrics, trace_settings
from rayllm.config.registry import Values, registry
from rayllm.config.serve import FrontendSettings, HttpSettings, RequestLogSettings, ServeSettings, TlsSettings
from rayllm.errors import ConfigError, RequestError
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.validate import Limits, check_sampling

_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
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
    "enable-auto-tool-choice",
    "exclude-tools-when-tool-choice-none",
    "tool-call-parser",
    "tool-parser-plugin",
    "reasoning-parser",
    "reasoning-parser-plugin",
    "tool-server",
)
"""Options that a gRPC server cannot honour."""


def resolve_serve(
    values: Values, facts: ModelFacts, engine: EngineConfig, files: Files, api_key: str | None, dev_mode: bool = False
) -> ServeSettings:
    names = tuple(values["served-model-name"] or (values["model"],))
    group = resolve_data_parallel(values)
    _check_tokenizer_options(values)
    tokens_only = values["tokens-only"] or values["skip-tokenizer-init"]
    _check_parsers(values, files, tokens_only)
    frontend = FrontendSettings(
        model_path=facts.path,
        served_model_names=names,
        tokenizer_path=None if values["skip-tokenizer-init"] else files.tokenizer or facts.path,
        max_model_len=engine.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        generation_defaults=_generation_defaults(values, facts, files, engine.max_model_len),
        chat_template=files.chat_template,
        chat_template_name=files.chat_template_name,
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
        # Servers of a group must not give equal seeds to different requests. (HTTP processes add 2**64 each.)
        seed=values["seed"] + (group.first << 96),
        trust_request_chat_template=values["trust-request-chat-template"],
        request_id_headers=values["enable-request-id-headers"],
        tokens_as_token_ids=values["return-tokens-as-token-ids"] or tokens_only,
        prompt_embeds=values["enable-prompt-embeds"],
        tokens_only=tokens_only,
        tool_parser=values["tool-call-parser"],
        tool_parser_plugin=files.tool_parser_plugin,
        reasoning_parser=values["reasoning-parser"] or None,
        reasoning_parser_plugin=files.reasoning_parser_plugin,
        reasoning_marks=_reasoning_marks(values),
        tool_servers=_tool_servers(values, tokens_only),
        auto_tools=values["enable-auto-tool-choice"],
        unused_tools=not values["exclude-tools-when-tool-choice-none"],
        render_workers=values["renderer-num-workers"],
        request_log=_request_log(values),
        log_error_stack=values["log-error-stack"],
        load_tracking=values["enable-server-load-tracking"],
        tokenizer_info=values["enable-tokenizer-info-endpoint"],
        priority_scheduling=engine.scheduling_policy == "priority",
        shown_metrics=shown_metrics(values),
        traces=trace_settings(values),
        profiling=engine.profiler is not None,
        elastic=group.elastic,
        dev_mode=dev_mode,
    )
    servers = values["api-server-count"] or group.engines
    if values["grpc"]:
        _check_grpc(values, servers)
    logs_as_told = files.log_config is not None and "uvicorn-log-level" not in values.given
    http = HttpSettings(
        grpc=values["grpc"],
        host=values["host"],
        port=values["port"],
        uds=values["uds"],
        servers=servers,
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
        data_parallel=group,
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


def _check_grpc(values: Values, servers: int) -> None:
    for name in HTTP_ONLY:
        if name in values.given and values[name] != registry()[name].default:
            raise ConfigError(f"--{name}", "is for HTTP, which --grpc replaces", "leave out one of them")
    if values["ssl-cert-reqs"] == 1:
        raise ConfigError("--ssl-cert-reqs", "gRPC servers check all clients or none", "give 0 or 2")
    if values["uds"] is not None and servers > 1:
        raise ConfigError("--uds", "gRPC servers cannot share a socket", "set --api-server-count 1, or leave it out")


def _check_tokenizer_options(values: Values) -> None:
    if not values["skip-tokenizer-init"]:
        return
    for name in NEED_TOKENIZER:
        if values[name] not in (None, False, "auto"):
            raise ConfigError(f"--{name}", "needs a tokenizer, and --skip-tokenizer-init loads none", "leave one out")


def _check_parsers(values: Values, files: Files, tokens_only: bool) -> None:
    for name, known in (("tool-call-parser", files.tool_parsers), ("reasoning-parser", files.reasoning_parsers)):
        if not values[name]:
            continue
        if values[name] not in known:
            raise ConfigError(f"--{name}", f"{values[name]!r} is no parser", f"choose one of {', '.join(known)}")
        if tokens_only:
            raise ConfigError(f"--{name}", "reads text, and this server makes none of its answers", "leave it out")
    if values["enable-auto-tool-choice"] and not values["tool-call-parser"]:
        raise ConfigError("--enable-auto-tool-choice", "needs a parser of the model's calls", "give --tool-call-parser")


_REASONING_KEYS = ("reasoning_parser", "reasoning_start_str", "reasoning_end_str")


def _reasoning_marks(values: Values) -> tuple[str, str]:
    config = values["reasoning-config"] or {}
    for key in config:
        if key not in _REASONING_KEYS:
            raise ConfigError(f"--reasoning-config.{key}", "is unknown", f"it takes {', '.join(_REASONING_KEYS)}")
    begin, end = (config.get(f"reasoning_{side}_str") or "" for side in ("start", "end"))
    for side, given in (("start", begin), ("end", end)):
        if not isinstance(given, str):
            raise ConfigError(f"--reasoning-config.reasoning_{side}_str", "must be a text", "give the mark itself")
    if values["reasoning-parser"]:
        if begin:
            raise ConfigError(
                "--reasoning-config.reasoning_start_str", "is what --reasoning-parser knows itself", "leave one out"
            )
    elif bool(begin) != bool(end):
        missing = "end" if begin else "start"
        raise ConfigError(
            f"--reasoning-config.reasoning_{missing}_str", "is missing beside the other mark", "give both marks"
        )
    return begin, end


def _tool_servers(values: Values, tokens_only: bool) -> tuple[str, ...]:
    given, option = values["tool-server"], "--tool-server"
    if given is None:
        return ()
    if tokens_only:
        raise ConfigError(option, "reads text, and this server makes none of its answers", "leave it out")
    places = tuple(part.strip() for part in given.split(","))
    if places == ("demo",):
        return places
    for place in places:
        match = _PLACE.fullmatch(place)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ConfigError(option, f"{place!r} is no host:port", "give such as localhost:8001,[::1]:8002, or demo")
    if len(set(places)) < len(places):
        raise ConfigError(option, "names a server twice", "name each once")
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(option, "the package mcp is not installed", "pip install 'rayllm[mcp]'")
    return places


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


def _generation_defaults(values: Values, facts: ModelFacts, files: Files, max_model_len: int) -> dict[str, Any]:
    """Sampling parameters of requests that do not set them. A `max_tokens` among them is a limit of all requests."""
    override = dict(values["override-generation-config"])
    if "max_new_tokens" in override:
        limit = override.pop("max_new_tokens")
        if override.setdefault("max_tokens", limit) != limit:
            raise ConfigError("--override-generation-config.max_new_tokens", "contradicts max_tokens", "give one")
    if unknown := override.keys() - SAMPLING_DEFAULTS:
        known = ", ".join(sorted(SAMPLING_DEFAULTS))
        raise ConfigError("--override-generation-config", f"{min(unknown)!r} has no default here", f"it takes {known}")
    _check_defaults(override, Limits(vocab_size=facts.vocab_size, max_model_len=max_model_len))
    base = facts.generation_defaults if files.generation_config is None else files.generation_config
    return {**base, **override}


def _check_defaults(override: dict[str, Any], limits: Limits) -> None:
    """Refuse what every request would be refused for."""
    given = {name: value for name, value in override.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        check_sampling(msgspec.convert(given, SamplingParams), limits)
        if given.get("max_tokens") == 0:
            raise RequestError("max_tokens must be at least 1")
    except (msgspec.ValidationError, RequestError) as error:
        raise ConfigError("--override-generation-config", str(error), "set a sound value") from None
