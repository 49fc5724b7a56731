"""Options of state space models."""

from rayllm.config.option import Kind, Option, State

MAMBA = (
    Option(
        name="mamba-backend", kind=Kind.STR, state=State.CUDA, default="triton", help="Kernels of Mamba's state update."
    ),
    Option(
        name="enable-mamba-cache-stochastic-rounding",
        kind=Kind.BOOL,
        state=State.PLANNED,
        default=False,
        help="Round states at random when they are written as float16.",
    ),
    Option(
        name="mamba-cache-philox-rounds",
        kind=Kind.INT,
        state=State.PLANNED,
        default=0,
        minimum=0,
        help="Rounds of the random numbers for that; 0: as many as the kernel has.",
    ),
)
