"""Options of the HTTP servers."""

from typing import Any

from rayllm.config.option import Kind, Option, State

LOG_LEVELS = ("critical", "debug", "error", "info", "trace", "warning")


def _texts(value: Any) -> str | None:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return None
    return "is not a JSON list of strings"


FRONTEND = (
    Option(
        name="lora-modules",
        kind=Kind.LIST,
        state=State.PLANNED,
        objects=True,
        cure="merge the adapter into the weights",
        help="LoRA adapters to serve, as name=path or as JSON objects of name, path and base_model_name.",
    ),
    Option(
        name="chat-template",
        kind=Kind.STR,
        help="Chat template instead of the tokenizer's own: a file, the template itself, or the name of one of several "
        "that the model brings, which is then for all conversations, with tools or without.",
    ),
    Option(
        name="chat-template-content-format",
        kind=Kind.ENUM,
        default="auto",
        choices=("auto", "openai", "string"),
        help="How a chat template is given contents: as plain text, as OpenAI's parts, or as it seems to expect.",
    ),
    Option(
        name="trust-request-chat-template",
        kind=Kind.BOOL,
        default=False,
        help="Let requests bring a chat template of their own.",
    ),
    Option(
        name="default-chat-template-kwargs",
        kind=Kind.JSON,
        check=lambda value: None if isinstance(value, dict) else "is not a JSON object",
        help="Arguments of the chat template for requests that do not set them.",
    ),
    Option(
        name="response-role",
        kind=Kind.STR,
        default="assistant",
        check=lambda value: None if value.strip() else "is empty",
        help="Role of the answer to a chat, unless the request says add_generation_prompt false.",
    ),
    Option(
        name="return-tokens-as-token-ids",
        kind=Kind.BOOL,
        default=False,
        help="Write tokens in logprobs as token_id:5 instead of their text.",
    ),
    Option(
        name="enable-auto-tool-choice",
        kind=Kind.BOOL,
        default=False,
        help="Let the model choose tools by itself; needs --tool-call-parser.",
    ),
    Option(
        name="exclude-tools-when-tool-choice-none",
        kind=Kind.BOOL,
        default=False,
        help="Leave tools out of the prompt where a request says tool_choice none.",
    ),
    Option(
        name="tool-call-parser",
        kind=Kind.STR,
        help="Parser of the model's tool calls, by its family, such as hermes or llama3_json; an unknown name lists "
        "all.",
    ),
    Option(
        name="tool-parser-plugin",
        kind=Kind.STR,
        default="",
        help="Python file that registers more tool parsers; rayllm/parsers/registry.py shows how.",
    ),
    Option(
        name="tool-server",
        kind=Kind.STR,
        help="MCP servers as host:port, parted by commas, whose tools /v1/responses may call (needs the package mcp), "
        "or demo for built-in tools: a calculator and a clock.",
    ),
    Option(
        name="log-config-file",
        kind=Kind.STR,
        help="JSON file for logging.config.dictConfig; it alone then decides over the loggers rayllm and uvicorn.",
    ),
    Option(
        name="max-log-len",
        kind=Kind.INT,
        unit="characters or tokens",
        minimum=0,
        help="Most characters, or token ids, of a prompt in the log. Unset: all.",
    ),
    Option(
        name="enable-prompt-tokens-details",
        kind=Kind.BOOL,
        default=False,
        help="Report cached prompt tokens in usage.prompt_tokens_details.",
    ),
    Option(
        name="enable-server-load-tracking",
        kind=Kind.BOOL,
        default=False,
        help="Let GET /load tell how many requests run or wait in the whole service; otherwise it tells 0.",
    ),
    Option(
        name="enable-force-include-usage",
        kind=Kind.BOOL,
        default=False,
        help="Report usage in every stream, asked for or not.",
    ),
    Option(
        name="enable-tokenizer-info-endpoint",
        kind=Kind.BOOL,
        default=False,
        help="Serve GET /tokenizer_info, for which no key is needed: the tokenizer's class, its settings and the chat "
        "template.",
    ),
    Option(
        name="enable-log-outputs",
        kind=Kind.BOOL,
        default=False,
        help="Log outputs as well; needs --enable-log-requests.",
    ),
    Option(
        name="enable-log-deltas",
        kind=Kind.BOOL,
        default=True,
        help="Log each piece of a stream, where outputs are logged; otherwise whole outputs only.",
    ),
    Option(
        name="log-error-stack",
        kind=Kind.BOOL,
        default=False,
        help="Log the stack of errors that become error responses; otherwise a line for each.",
    ),
    Option(
        name="tokens-only",
        kind=Kind.BOOL,
        default=False,
        help="Answer with token ids and no text, for deployments that render text elsewhere. What needs the text of an "
        "answer, such as stop strings, is refused.",
    ),
    Option(name="host", kind=Kind.STR, help="Host name or address to listen on. Unset: all addresses."),
    Option(name="port", kind=Kind.INT, default=8000, minimum=0, maximum=65535, help="Port; 0 takes a free one."),
    Option(name="uds", kind=Kind.STR, help="Unix domain socket to listen on in place of --host and --port."),
    Option(
        name="uvicorn-log-level",
        kind=Kind.ENUM,
        default="info",
        choices=LOG_LEVELS,
        help="Log level of the HTTP server. debug adds a line for each connection, trace what goes over it.",
    ),
    Option(
        name="disable-uvicorn-access-log", kind=Kind.BOOL, default=False, help="Do not log a line for each request."
    ),
    Option(
        name="disable-access-log-for-endpoints",
        kind=Kind.LIST,
        separator=",",
        help="Paths kept out of the access log, parted by commas, such as /health,/metrics.",
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
    Option(
        name="api-key",
        kind=Kind.LIST,
        help="Keys, one of which a request to /v1 must carry (Authorization: Bearer KEY). RLLM_API_KEY does the same.",
    ),
    Option(name="ssl-keyfile", kind=Kind.STR, help="Private key of the server (PEM), if not in --ssl-certfile."),
    Option(name="ssl-certfile", kind=Kind.STR, help="Certificate of the server (PEM), for HTTPS."),
    Option(
        name="ssl-ca-certs",
        kind=Kind.STR,
        help="Certificates of the authorities that may have signed clients' certificates; goes with --ssl-cert-reqs.",
    ),
    Option(
        name="enable-ssl-refresh",
        kind=Kind.BOOL,
        default=False,
        help="Load key, certificate and authorities again when their files change, for new connections.",
    ),
    Option(
        name="ssl-cert-reqs",
        kind=Kind.INT,
        default=0,
        minimum=0,
        maximum=2,
        help="Whether clients need a certificate: 0 no, 1 optional, 2 required.",
    ),
    Option(
        name="ssl-ciphers",
        kind=Kind.STR,
        help="Cipher suites of TLS 1.2 and below, in OpenSSL's notation.",
    ),
    Option(name="root-path", kind=Kind.STR, help="Path under which a proxy in front publishes the server."),
    Option(
        name="middleware",
        kind=Kind.LIST,
        default=[],
        repeats=True,
        help="Middleware by import path, package.module.name: an ASGI class, or an async function of request and "
        "call_next. May be repeated; the last is outermost.",
    ),
    Option(
        name="enable-request-id-headers",
        kind=Kind.BOOL,
        default=False,
        help="Add X-Request-Id to responses: the request's own, or a new one.",
    ),
    Option(
        name="disable-fastapi-docs",
        kind=Kind.BOOL,
        default=False,
        help="Serve no /docs, /redoc and /openapi.json.",
    ),
    Option(
        name="h11-max-incomplete-event-size",
        kind=Kind.INT,
        default=4194304,
        unit="bytes",
        minimum=1,
        help="Most bytes of a request's first line and headers; more are answered with 431.",
    ),
    Option(
        name="h11-max-header-count",
        kind=Kind.INT,
        default=256,
        minimum=1,
        help="Most headers of a request; more are answered with 431.",
    ),
    Option(
        name="enable-offline-docs",
        kind=Kind.BOOL,
        default=False,
        help="Serve /docs and /redoc with scripts and styles of their own, without anything from outside.",
    ),
    Option(
        name="enable-flash-late-interaction",
        kind=Kind.BOOL,
        state=State.CUDA,
        default=True,
        warns=True,
        help="Score late-interaction models on a GPU of the HTTP process.",
    ),
)
