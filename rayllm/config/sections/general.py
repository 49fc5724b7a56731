"""Options of the process as a whole."""

from rayllm.config.option import Kind, Option, State

GENERAL = (
    Option(
        name="headless",
        kind=Kind.BOOL,
        state=State.PLANNED,
        default=False,
        negatable=False,
        cure="let further nodes join the Ray cluster",
        help="Run engine workers only, without an HTTP server: for the further nodes of a deployment.",
    ),
    Option(
        name="api-server-count",
        kind=Kind.INT,
        aliases=("-asc",),
        minimum=1,
        maximum=256,
        help="HTTP or gRPC server processes, which share the port. Unset: as many as this server has engines.",
    ),
    Option(
        name="config",
        kind=Kind.STR,
        help="YAML file of option names (no dashes in front) and values; the command line beats it.",
    ),
    Option(
        name="grpc",
        kind=Kind.BOOL,
        default=False,
        negatable=False,
        help="Serve gRPC (rayllm/grpc/rayllm.proto) in place of HTTP; needs the extra grpc.",
    ),
    Option(
        name="disable-log-stats",
        kind=Kind.BOOL,
        default=False,
        negatable=False,
        help="Do not log a line of engine statistics every ten seconds while requests run.",
    ),
    Option(
        name="aggregate-engine-logging",
        kind=Kind.BOOL,
        default=False,
        negatable=False,
        help="With several engines, log one line of statistics for all of them together.",
    ),
    Option(
        name="fail-on-environ-validation",
        kind=Kind.BOOL,
        default=False,
        help="End the start where an RLLM_ variable is unknown; otherwise it is a warning.",
    ),
    Option(
        name="shutdown-timeout",
        kind=Kind.INT,
        default=0,
        minimum=0,
        help="Seconds that running requests may take to finish after SIGTERM or Ctrl-C; 0 cuts them at once.",
    ),
    Option(
        name="gdn-prefill-backend",
        kind=Kind.ENUM,
        state=State.CUDA,
        choices=("flashinfer", "triton"),
        help="Kernels of the prefill of gated delta net layers. Unset: chosen by the model.",
    ),
    Option(
        name="enable-log-requests",
        kind=Kind.BOOL,
        default=False,
        help="Log each request: its id and parameters, and its prompt where RLLM_LOGGING_LEVEL is DEBUG.",
    ),
)
