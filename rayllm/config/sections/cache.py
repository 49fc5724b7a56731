"""Options of the KV cache."""

from rayllm.config.option import Kind, Option, State

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
        name="kv-cache-dtype",
        kind=Kind.ENUM,
        default="auto",
        choices=(
            "auto",
            "bfloat16",
            "float16",
            "fp8",
            "fp8_ds_mla",
            "fp8_e4m3",
            "fp8_e5m2",
            "fp8_inc",
            "fp8_per_token_head",
            "int8_per_token_head",
            "nvfp4",
            "turboquant_3bit_nc",
            "turboquant_4bit_nc",
            "turboquant_k3v4_nc",
            "turboquant_k8v4",
        ),
        help="Type of keys and values in the cache; auto: that of the model. In eight bits: fp8 (fp8_e4m3) and "
        "fp8_e5m2 have a scale for each layer, from the checkpoint, else 1; int8_per_token_head and "
        "fp8_per_token_head one for each token and head, which takes four bytes more.",
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
    Option(
        name="prefix-caching-hash-algo",
        kind=Kind.ENUM,
        default="sha256",
        choices=("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
        help="Hash of prefixes. Those with cbor are the same in every language; xxhash is fast, but who can choose "
        "prompts may find two that it takes for one.",
    ),
    Option(
        name="calculate-kv-scales",
        kind=Kind.BOOL,
        default=False,
        help="Deprecated. Take the scales of an fp8 cache from the first step of each engine, not from the checkpoint.",
    ),
    Option(
        name="kv-cache-dtype-skip-layers",
        kind=Kind.LIST,
        default=[],
        help="Layers whose cache keeps the model's type: their numbers, from 0, or sliding_window for those with one.",
    ),
    Option(
        name="kv-sharing-fast-prefill",
        kind=Kind.BOOL,
        state=State.PLANNED,
        default=False,
        help="Skip the prefill of layers that share another's cache.",
    ),
    Option(
        name="mamba-cache-dtype",
        kind=Kind.ENUM,
        state=State.PLANNED,
        default="auto",
        choices=("auto", "float16", "float32"),
        help="Type of Mamba's states; auto: as the model says.",
    ),
    Option(
        name="mamba-ssm-cache-dtype",
        kind=Kind.ENUM,
        state=State.PLANNED,
        default="auto",
        choices=("auto", "float16", "float32"),
        help="Type of the state space states alone; auto: that of --mamba-cache-dtype.",
    ),
    Option(
        name="mamba-block-size",
        kind=Kind.INT,
        state=State.PLANNED,
        unit="tokens",
        minimum=8,
        help="Tokens between stored states.",
    ),
    Option(
        name="mamba-cache-mode",
        kind=Kind.ENUM,
        state=State.PLANNED,
        default="none",
        choices=("align", "all", "none"),
        help="Which states are kept for prefix caching.",
    ),
    Option(
        name="kv-offloading-size",
        kind=Kind.FLOAT,
        state=State.PLANNED,
        unit="GiB",
        minimum=0,
        help="Memory for KV blocks that left the cache.",
    ),
    Option(
        name="kv-offloading-backend",
        kind=Kind.ENUM,
        state=State.PLANNED,
        default="native",
        choices=("lmcache", "native"),
        help="What keeps them.",
    ),
)
