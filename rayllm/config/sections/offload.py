"""Options of weights outside the GPU."""

from rayllm.config.option import Kind, Option, State

ALREADY = "weights are in CPU memory already"

OFFLOAD = (
    Option(
        name="offload-backend",
        kind=Kind.ENUM,
        state=State.CUDA,
        default="auto",
        choices=("auto", "prefetch", "uva"),
        warns=True,
        why=ALREADY,
        help="How weights in CPU memory reach the GPU.",
    ),
    Option(
        name="cpu-offload-gb",
        kind=Kind.FLOAT,
        state=State.CUDA,
        default=0,
        unit="GiB",
        minimum=0,
        warns=True,
        why=ALREADY,
        help="Weights kept in CPU memory, for each GPU.",
    ),
    Option(
        name="cpu-offload-params",
        kind=Kind.LIST,
        state=State.CUDA,
        default=[],
        warns=True,
        why=ALREADY,
        help="Parts of parameter names that this is limited to.",
    ),
    Option(
        name="offload-group-size",
        kind=Kind.INT,
        state=State.CUDA,
        default=0,
        minimum=0,
        warns=True,
        why=ALREADY,
        help="Layers of a group, of which the last ones are kept in CPU memory; 0: none.",
    ),
    Option(
        name="offload-num-in-group",
        kind=Kind.INT,
        state=State.CUDA,
        default=1,
        minimum=1,
        warns=True,
        why=ALREADY,
        help="How many of a group are.",
    ),
    Option(
        name="offload-prefetch-step",
        kind=Kind.INT,
        state=State.CUDA,
        default=1,
        minimum=0,
        warns=True,
        why=ALREADY,
        help="Layers to fetch ahead.",
    ),
    Option(
        name="offload-params",
        kind=Kind.LIST,
        state=State.CUDA,
        default=[],
        warns=True,
        why=ALREADY,
        help="Parts of parameter names that this is limited to.",
    ),
)
