"""Options of the KV cache."""

from rayllm.config.option import Kind, Option

CACHE = (
    Option(
        name="block-size", kind=Kind.INT, default=None, minimum=1, maximum=1024, help="Tokens in a KV block. Unset: 16."
    ),
    Option(
        name="gpu-memory-utilization",
        kind=Kind.FLOAT,
        default=0.92,
        maximum=1.0,
        check=lambda value: None if value > 0 else f"{value} is not above 0",
        help="Share of a GPU's memory that one engine may use. On a CPU it scales the share of free memory for KV: the "
        "default is 40%, half the value is half of that.",
    ),
    Option(
        name="kv-cache-memory-bytes",
        kind=Kind.HUMAN_INT,
        minimum=1,
        help="Size of an engine's KV cache in bytes; beats --gpu-memory-utilization.",
    ),
    Option(
        name="num-gpu-blocks-override",
        kind=Kind.INT,
        minimum=1,
        help="Number of an engine's KV blocks, whatever memory they take.",
    ),
    Option(
        name="enable-prefix-caching",
        kind=Kind.BOOL,
        default=None,
        help="Reuse KV blocks of equal prefixes. Unset: on.",
    ),
)
