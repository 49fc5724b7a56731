"""Options of CUDA graphs."""

from rayllm.config.option import Kind, Option, State

COMPILATION = (
    Option(
        name="cudagraph-capture-sizes",
        kind=Kind.LIST,
        state=State.CUDA,
        integers=True,
        warns=True,
        help="Batch sizes to capture CUDA graphs for.",
    ),
    Option(
        name="max-cudagraph-capture-size",
        kind=Kind.INT,
        state=State.CUDA,
        minimum=0,
        warns=True,
        help="Largest of them.",
    ),
)
