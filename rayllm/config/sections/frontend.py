"""Options of the HTTP servers."""

from typing import Any

from rayllm.config.option import Kind, Option

LOG_LEVELS = ("critical", "debug", "error", "info", "trace", "warning")


def _texts(value: Any) -> str | None:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return None
    return "is not a JSON list of strings"


FRONTEND = (
    Option(name="host", kind=Kind.STR, help="Host name or address to listen on. Unset: all addresses."),
    Option(name="port", kind=Kind.INT, default=8000, minimum=0, maximum=65535, help="Port; 0 takes a free one."),
    Option(name="uds", kind=Kind.STR, help="Unix domain socket to listen on in place of --host and --port."),
    Option(
        name="api-key",
        kind=Kind.LIST,
        help="Keys, one of which a request to /v1 must carry (Authorization: Bearer KEY). RLLM_API_KEY does the same.",
    ),
    Option(
        name="chat-template",
        kind=Kind.STR,
        help="Chat template instead of the tokenizer's own: a file, or the template itself.",
    ),
    Option(
        name="trust-request-chat-template",
        kind=Kind.BOOL,
        default=False,
        help="Let requests bring a chat template of their own.",
    ),
    Option(
        name="return-tokens-as-token-ids",
        kind=Kind.BOOL,
        default=False,
        help="Write tokens in logprobs as token_id:5 instead of their text.",
    ),
    Option(
        name="enable-request-id-headers",
        kind=Kind.BOOL,
        default=False,
        help="Add X-Request-Id to responses: the request's own, or a new one.",
    ),
    Option(
        name="enable-prompt-tokens-details",
        kind=Kind.BOOL,
        default=False,
        help="Report cached prompt tokens in usage.prompt_tokens_details.",
    ),
    Option(
        name="uvicorn-log-level",
        kind=Kind.ENUM,
        default="info",
        choices=LOG_LEVELS,
        help="Log level of the HTTP server.",
    ),
    Option(
        name="disable-uvicorn-access-log", kind=Kind.BOOL, default=False, help="Do not log a line for each request."
    ),
    Option(name="allow-credentials", kind=Kind.BOOL, default=False, help="Allow credentials in cross-origin requests."),
    Option(
        name="allowed-origins",
        kind=Kind.JSON,
        default=["*"],
        check=_texts,
        help="Origins that may send requests (CORS).",
    ),
    Option(name="allowed-methods", kind=Kind.JSON, default=["*"], check=_texts, help="Methods allowed to them."),
    Option(name="allowed-headers", kind=Kind.JSON, default=["*"], check=_texts, help="Headers allowed to them."),
    Option(name="root-path", kind=Kind.STR, help="Path under which a proxy in front publishes the server."),
)
