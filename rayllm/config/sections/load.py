"""Options of how weights are read."""

from typing import Any

from rayllm.config.option import Kind, Option

KNOWN_FORMATS = (
    "auto", "pt", "safetensors", "instanttensor", "npcache", "dummy", "tensorizer", "runai_streamer",
    "runai_streamer_sharded", "bitsandbytes", "sharded_state", "gguf", "mistral",
)  # fmt: skip

REFUSED_FORMATS = {
    "bitsandbytes": "rayllm has no products for the layouts of the package bitsandbytes; GGUF files can be quantized",
    "instanttensor": "the package instanttensor loads into CUDA GPUs only; leave it out to read safetensors otherwise",
}


def _check_format(value: str) -> str | None:
    if value in REFUSED_FORMATS:
        return f"{value} is not supported: {REFUSED_FORMATS[value]}"
    return None if value in KNOWN_FORMATS else f"{value!r} is not one of {', '.join(KNOWN_FORMATS)}"


def _check_map_location(value: Any) -> str | None:
    if isinstance(value, str):
        return None
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        return f"{value!r} is neither a device nor a JSON object from device to device"
    return '"" stands for all devices, and must be the only key' if "" in value and len(value) > 1 else None


LOAD = (
    Option(
        name="load-format",
        kind=Kind.STR,
        default="auto",
        choices=KNOWN_FORMATS,
        check=_check_format,
        help="Format of the weights. auto: safetensors, else consolidated*.safetensors (mistral), else *.bin (pt), "
        "else sharded_state; pt: files of torch.save, of which only tensors are read; npcache: the same, kept as numpy "
        "files in np/ beside them for the next start; sharded_state: files that `python -m rayllm.model.sharded_state` "
        "wrote; dummy: random weights from --seed. tensorizer and runai_streamer need packages of those names; "
        "bitsandbytes and instanttensor are refused.",
    ),
    Option(
        name="download-dir",
        kind=Kind.STR,
        help="Folder for what is fetched from the hub. Unset: the hub's cache (HF_HOME).",
    ),
    Option(
        name="safetensors-load-strategy",
        kind=Kind.ENUM,
        choices=("lazy", "eager", "prefetch", "torchao"),
        help="How safetensors files are read: mapped and read when needed (lazy), whole into memory (eager), or whole "
        "into the page cache first (prefetch); torchao is refused. Unset: lazy, but prefetch on a network file system "
        "where the weights fit into 90% of the free memory.",
    ),
    Option(
        name="model-loader-extra-config",
        kind=Kind.JSON,
        default={},
        check=lambda value: None if isinstance(value, dict) else "is not a JSON object",
        help="Settings of the loader of --load-format. enable_multithread_load and num_threads (safetensors, mistral, "
        "gguf, pt, npcache, sharded_state); pattern (sharded_state); concurrency and memory_limit (runai_streamer); "
        "tensorizer_uri, a path (tensorizer).",
    ),
    Option(
        name="ignore-patterns",
        kind=Kind.LIST,
        default=["original/**/*"],
        help="Files of the model's folder, here or on the hub, that are left out.",
    ),
    Option(
        name="use-tqdm-on-load",
        kind=Kind.BOOL,
        default=True,
        help="Show a progress bar over the files with weights while they are read.",
    ),
    Option(
        name="pt-load-map-location",
        kind=Kind.JSON,
        default="cpu",
        plain=True,
        check=_check_map_location,
        help="Where torch.load puts tensors of pt files at first: a device, or a JSON object from device to device.",
    ),
)
