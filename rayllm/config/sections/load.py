"""Options of how weights are read."""

from rayllm.config.option import Kind, Option, State

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
KNOWN_FORMATS = (
    "auto", "pt", "safetensors", "instanttensor", "npcache", "dummy", "tensorizer", "runai_streamer",
    "runai_streamer_sharded", "bitsandbytes", "sharded_state", "gguf", "mistral",
)  # fmt: skip

LOAD = (
    Option(
        name="load-format",
        kind=Kind.STR,
        default="auto",
        choices=KNOWN_FORMATS,
        check=lambda value: (
            None if value in LOAD_FORMATS else f"{value!r} is not supported yet, only {', '.join(LOAD_FORMATS)}"
        ),
        help="Format of the weights. auto: by what is there; dummy: random weights from --seed.",
    ),
    Option(
        name="download-dir",
        kind=Kind.STR,
        state=State.PLANNED,
        help="Folder for downloaded models. Unset: the hub's cache.",
    ),
    Option(
        name="safetensors-load-strategy",
        kind=Kind.ENUM,
        state=State.PLANNED,
        choices=("lazy", "eager", "prefetch", "torchao"),
        help="How safetensors files are read: mapped and read when needed (lazy), whole into memory (eager), or whole "
        "into the page cache first (prefetch). Unset: lazy, and prefetch on a network file system.",
    ),
    Option(
        name="model-loader-extra-config",
        kind=Kind.JSON,
        state=State.PLANNED,
        default={},
        help="Settings of the loader of --load-format.",
    ),
    Option(
        name="ignore-patterns",
        kind=Kind.LIST,
        state=State.PLANNED,
        default=["original/**/*"],
        help="Files of the model's folder that are left out.",
    ),
    Option(
        name="use-tqdm-on-load",
        kind=Kind.BOOL,
        state=State.PLANNED,
        default=True,
        help="Show a progress bar while weights are read.",
    ),
    Option(
        name="pt-load-map-location",
        kind=Kind.JSON,
        state=State.PLANNED,
        default="cpu",
        plain=True,
        help="Where torch.load puts tensors: a device, or a JSON object from device to device.",
    ),
)
