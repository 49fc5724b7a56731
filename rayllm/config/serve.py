"""The resolved settings of everything around the engines: HTTP servers, front end, deployments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rayllm.config.data_parallel import DataParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """Where the spans of requests go, and what they tell."""

    endpoint: str
    """URL of the collector, as its protocol needs it."""
    protocol: Literal["http", "grpc"]
    """Of OTLP."""
    model: bool = False
    """Whether spans tell how long the model took."""
    worker: bool = False
    """Whether spans tell how long the workers' steps took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLogSettings:
    """What is logged of each request, beside its id and parameters."""

    outputs: bool = False
    deltas: bool = True
    """With `outputs`, each piece of a stream too."""
    max_prompt_length: int | None = None
    """Most characters, and most token ids, of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """What turns requests into tokens and tokens into answers; the same in every ingress process."""

    model_path: str
    served_model_names: tuple[str, ...]
    """At least one; the first stands in responses and metric labels."""
    tokenizer_path: str | None
    """None: no tokenizer, so that prompts are token ids. Goes with `tokens_only`."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of requests that do not set them, under the names of the API."""
    chat_template: str | None = None
    """The template itself, in place of the tokenizer's own."""
    chat_template_name: str | None = None
    """Which of the tokenizer's own is for all conversations; None: the default, and with tools the one for them."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template for requests that do not set them."""
    content_format: str = "auto"
    """What templates get as contents: `string`, `openai` (lists of parts), or `auto`, as they seem to expect."""
    response_role: str = "assistant"
    max_logprobs: int = 20
    """-1: no limit."""
    prompt_tokens_details: bool = False
    force_usage: bool = False
    """Whether streams tell the usage at their end, asked for or not."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    middleware: tuple[str, ...] = ()
    """Import paths of functions and classes around the app, the first one innermost."""
    docs: str = "online"
    """Whether `/docs` and `/redoc` load their parts from elsewhere (`online`), from here (`offline`) or are `off`."""
    seed: int = 0
    """From it come the seeds of requests that bring none; differs between HTTP processes."""
    max_body_bytes: int = 64 << 20
    """Larger request bodies are refused with 413."""
    trust_request_chat_template: bool = False
    """Whether a request may bring a chat template of its own."""
    request_id_headers: bool = False
    """Whether responses carry X-Request-Id."""
    tokens_as_token_ids: bool = False
    """Logprobs name tokens as `token_id:5`, in every response."""
    prompt_embeds: bool = False
    """Whether prompts may come as embeddings."""
    tokens_only: bool = False
    """Whether answers hold token ids and no text."""
    render_workers: int = 1
    """Threads that render prompts, in each process."""
    request_log: RequestLogSettings | None = None
    """None: requests are not logged."""
    log_error_stack: bool = False
    load_tracking: bool = False
    """Whether `/load` counts."""
    tokenizer_info: bool = False
    """Whether there is `/tokenizer_info`."""
    tool_parser: str | None = None
    """What finds tool calls in answers, by its name."""
    tool_parser_plugin: str | None = None
    """File that registers tool parsers."""
    reasoning_parser: str | None = None
    """What parts reasoning from answers, by its name."""
    reasoning_parser_plugin: str | None = None
    reasoning_marks: tuple[str, str] = ("", "")
    """What begins and what ends reasoning, beside what the parser knows."""
    tool_servers: tuple[str, ...] = ()
    """Places of MCP servers, as host:port; or `demo` alone."""
    auto_tools: bool = False
    """Whether models may choose tools themselves. Goes with `tool_parser`."""
    unused_tools: bool = True
    """Whether a prompt shows tools that the request does not let the model use."""
    priority_scheduling: bool = False
    """Whether engines heed `priority`; where not, a priority other than 0 is refused."""
    shown_metrics: Mapping[str, str] = field(default_factory=dict)
    """Hidden names of metrics that are shown nevertheless, each with what the metric is called now."""
    traces: TraceSettings | None = None
    """None: no request is traced."""
    profiling: bool = False
    """Whether engines can be profiled, by `/start_profile` and `/stop_profile`."""
    elastic: bool = False
    """Whether the number of engines can be changed, by `/scale_elastic_ep`."""
    dev_mode: bool = False
    """Whether the endpoints for developers are there."""

    @property
    def max_tokens(self) -> int | None:
        """Most output tokens of any request: a default of `max_tokens` is a limit too."""
        return self.generation_defaults.get("max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How a process logs."""

    level: str = "INFO"
    config: Mapping[str, Any] | None = None
    """For `logging.config.dictConfig`, in place of our own handlers and uvicorn's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """What HTTPS needs, as files in PEM."""

    certfile: str
    keyfile: str | None = None
    """None: the certificate's file holds the key as well."""
    ca_certs: str | None = None
    cert_reqs: int = 0
    """As in `ssl.VerifyMode`: whether clients need a certificate."""
    ciphers: str | None = None
    refresh: bool = False
    """Whether changed files are loaded again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """How `rayllm serve` listens. Not used under `serve run`, where Serve's proxy listens."""

    grpc: bool = False
    """gRPC in place of HTTP."""
    host: str | None = None
    port: int = 8000
    uds: str | None = None
    servers: int = 1
    tls: TlsSettings | None = None
    log_level: str | None = "info"
    """None: as the log config says."""
    log_config: bool = False
    """Whether a log config decides over uvicorn's loggers too."""
    access_log: bool = True
    hidden_paths: frozenset[str] = frozenset()
    """Paths kept out of the access log."""
    max_head_bytes: int = 4 << 20
    max_headers: int = 256
    shutdown_timeout_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """All of the service but the engine's own settings."""

    frontend: FrontendSettings
    http: HttpSettings
    data_parallel: DataParallel = field(default_factory=DataParallel)
    log_stats: bool = True
    aggregate_stats: bool = False
    """One line for all engines, not one for each."""
    log_config: Mapping[str, Any] | None = None
    """What `--log-config-file` holds."""
