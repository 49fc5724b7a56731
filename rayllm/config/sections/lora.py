"""Options of LoRA adapters."""

from rayllm.config.option import Kind, Option, State

LORA = (
    Option(
        name="enable-lora",
        kind=Kind.BOOL,
        state=State.PLANNED,
        default=None,
        honoured=(False,),
        cure="merge the adapter into the weights",
        help="Serve LoRA adapters.",
    ),
    Option(name="max-loras", kind=Kind.INT, state=State.PLANNED, default=1, minimum=1, help="Adapters in one step."),
    Option(
        name="max-lora-rank",
        kind=Kind.INT,
        state=State.PLANNED,
        default=16,
        choices=(1, 8, 16, 32, 64, 128, 256, 320, 512),
        help="Largest rank of an adapter.",
    ),
    Option(
        name="lora-dtype",
        kind=Kind.STR,
        state=State.PLANNED,
        default="auto",
        help="Type of adapters; auto: that of the model.",
    ),
    Option(
        name="enable-tower-connector-lora",
        kind=Kind.BOOL,
        state=State.PLANNED,
        default=False,
        help="Allow adapters of the vision encoder.",
    ),
    Option(name="max-cpu-loras", kind=Kind.INT, state=State.PLANNED, minimum=1, help="Adapters kept in CPU memory."),
    Option(
        name="fully-sharded-loras",
        kind=Kind.BOOL,
        state=State.PLANNED,
        default=False,
        help="Split adapters over workers altogether.",
    ),
    Option(
        name="lora-target-modules",
        kind=Kind.LIST,
        state=State.PLANNED,
        help="Endings of the modules that adapters may change. Unset: all.",
    ),
    Option(name="default-mm-loras", kind=Kind.JSON, state=State.PLANNED, help="Adapter for each kind of media."),
    Option(
        name="specialize-active-lora",
        kind=Kind.BOOL,
        state=State.CUDA,
        default=False,
        warns=True,
        help="Capture CUDA graphs by the number of active adapters.",
    ),
)
