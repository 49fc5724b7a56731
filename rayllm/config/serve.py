"""The resolved settings of everything around the engines: HTTP servers, front end, deployments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """What turns requests into tokens and tokens into answers; the same in every ingress process."""

    model_path: str
    served_model_names: tuple[str, ...]
    """At least one; the first stands in responses and metric labels."""
    tokenizer_path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of requests that do not set them, under the names of the API."""
    chat_template: str | None = None
    """The template itself, in place of the tokenizer's own."""
    max_logprobs: int = 20
    """-1: no limit."""
    prompt_tokens_details: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
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
    priority_scheduling: bool = False
    """Whether engines heed `priority`; where not, a priority other than 0 is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """How `rayllm serve` listens. Not used under `serve run`, where Serve's proxy listens."""

    host: str | None = None
    port: int = 8000
    uds: str | None = None
    servers: int = 1
    log_level: str = "info"
    access_log: bool = True
    shutdown_timeout_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """All of the service but the engine's own settings."""

    frontend: FrontendSettings
    http: HttpSettings
    engines: int = 1
    log_stats: bool = True
