"""Options of the process as a whole."""

from rayllm.config.option import Kind, Option

GENERAL = (
    Option(
        name="config",
        kind=Kind.STR,
        help="YAML file of option names (no dashes in front) and values; the command line beats it.",
    ),
    Option(
        name="ray-address",
        kind=Kind.STR,
        help="Ray cluster to serve on, as in ray.init(address=...). Unset: the one that RAY_ADDRESS names, else a "
        "private Ray on this machine, which ends with the server.",
    ),
    Option(
        name="api-server-count",
        kind=Kind.INT,
        aliases=("-asc",),
        minimum=1,
        maximum=256,
        help="HTTP server processes, which share the port. Unset: as many as --data-parallel-size.",
    ),
    Option(
        name="shutdown-timeout",
        kind=Kind.INT,
        default=0,
        minimum=0,
        help="Seconds that running requests may take to finish after SIGTERM or Ctrl-C; 0 cuts them at once.",
    ),
    Option(
        name="disable-log-stats",
        kind=Kind.BOOL,
        default=False,
        negatable=False,
        help="Do not log a line of engine statistics every ten seconds while requests run.",
    ),
)
