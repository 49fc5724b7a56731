"""How weights are read: from options and what the files are to frozen settings. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayllm.config.hardware import Hardware
from rayllm.config.model_facts import ModelFacts
from rayllm.config.registry import Values, registry
from rayllm.config.weight_files import SHARDED_PATTERN
from rayllm.errors import ConfigError

if TYPE_CHECKING:
    from rayllm.config.engine import EngineConfig
    from rayllm.config.files import Files

SAFETENSORS = ("safetensors", "mistral", "sharded_state")
"""Formats that --safetensors-load-strategy is about."""
PICKLED = ("pt", "npcache")
DEPRECATED = (
    "bitblas", "deepspeedfp", "experts_int8", "fbgemm_fp8", "fp_quant", "gptq_bitblas", "gptq_marlin_24", "hqq", "ipex",
    "ptpc_fp8", "rtn", "tpu_int8",
)  # fmt: skip
"""Methods of quantization that are about to go: newer ones took their place."""
UNDONE = ("fbgemm_fp8",)
"""Those of them whose weights are turned back as they are read. So are those of `fp8` with scales of blocks."""
PREFETCH_SHARE = 0.9
"""Weights that take more of the free memory than this would drive each other out of the page cache."""
DEFAULT_THREADS = 8
_THREADS: Mapping[str, type] = {"enable_multithread_load": bool, "num_threads": int}
EXTRA_KEYS: Mapping[str, Mapping[str, type]] = {
    "safetensors": _THREADS,
    "mistral": _THREADS,
    "gguf": _THREADS,
    "pt": _THREADS,
    "npcache": _THREADS,
    "sharded_state": {**_THREADS, "pattern": str},
    "runai_streamer": {"concurrency": int, "memory_limit": int},
    "runai_streamer_sharded": {"concurrency": int, "memory_limit": int, "pattern": str},
    "tensorizer": {"tensorizer_uri": str},
    "dummy": {},
}
"""Keys of --model-loader-extra-config by format, with the type of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """What a loader needs to know."""

    format: str = "auto"
    """A value of --load-format; `auto` takes what the folder holds."""
    strategy: str = "lazy"
    """`lazy`, `eager` or `prefetch`, of safetensors."""
    strategy_reason: str = ""
    """Why it is not the default, where no option says so."""
    ignored: tuple[str, ...] = ()
    """Patterns of files that are as good as absent."""
    show_progress: bool = False
    threads: int = 1
    quantization: str | None = None
    """What quantized the weights of a folder that is read nonetheless: `fbgemm_fp8` or `fp8`."""
    quantized_blocks: tuple[int, int] = (0, 0)
    """Rows and columns of a block that has a scale, of `fp8`."""
    map_location: str | Mapping[str, str] = "cpu"
    """Of torch.load."""
    pattern: str = SHARDED_PATTERN
    """Names of the files of sharded_state."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a loader of another package."""


def resolve_weights(values: Values, facts: ModelFacts, hardware: Hardware, files: "Files") -> WeightsConfig:
    """Decide how the weights are read.

    Raises:
        ConfigError: an option contradicts the files, or is not about their format.
    """
    format_ = _format(values["load-format"], facts, files)
    if _differs(values, "ignore-patterns") and facts.format == "gguf":
        raise ConfigError("--ignore-patterns", f"{facts.path} is a single file", "leave it out")
    if _differs(values, "pt-load-map-location") and format_ not in PICKLED:
        raise ConfigError("--pt-load-map-location", f"the weights are {format_}, not of torch.save", "leave it out")
    extra = _extra(values["model-loader-extra-config"], format_)
    strategy, reason = _strategy(values["safetensors-load-strategy"], format_, files, hardware)
    return WeightsConfig(
        format=format_,
        strategy=strategy,
        strategy_reason=reason,
        ignored=tuple(values["ignore-patterns"]),
        show_progress=values["use-tqdm-on-load"],
        threads=_threads(extra),
        quantization=_quantization(values, facts, format_),
        quantized_blocks=_fp8_blocks(facts) or (0, 0),
        map_location=values["pt-load-map-location"],
        pattern=extra.get("pattern", SHARDED_PATTERN),
        extra={name: value for name, value in extra.items() if name not in _THREADS and name != "pattern"},
    )


def weight_notes(values: Values, engine: "EngineConfig") -> Iterator[str]:
    """What the user should know about how the model is read."""
    if engine.weights.quantization == "fp8":
        yield f"the weights have 8 bits (fp8): they are read as {engine.dtype}, and take the room of that"
    elif engine.weights.quantization is not None:
        yield (
            f"the weights are quantized by {engine.weights.quantization}, which is deprecated: support for it may end. "
            f"They are read as {engine.dtype}"
        )
    if not values["trust-remote-code"] or not engine.model.config.get("auto_map"):
        return
    if engine.model_impl == "transformers":
        yield f"--trust-remote-code: code of the model's own is run, of {engine.code}"
    else:
        yield "--trust-remote-code: the model's config is taken as it stands; code of its own is not run"


def _differs(values: Values, name: str) -> bool:
    """Whether an option has another value than its default, which may always be written out."""
    return bool(values[name] != registry()[name].default)


def _format(wanted: str, facts: ModelFacts, files: "Files") -> str:
    if facts.format == "gguf":
        if wanted not in ("auto", "gguf", "dummy"):
            raise ConfigError("--load-format", f"{facts.path} is a GGUF file, not {wanted}", "leave it out")
        return "gguf" if wanted == "auto" else wanted
    if wanted == "gguf":
        raise ConfigError("--load-format", f"{facts.path} is not a GGUF file", "leave it out")
    return files.weight_format if wanted == "auto" else wanted


def _quantization(values: Values, facts: ModelFacts, format_: str) -> str | None:
    """How the weights of a folder are quantized, if that can be undone as they are read; GGUF has kinds of its own."""
    stated = facts.config.get("quantization_config")
    found = "gguf" if facts.format == "gguf" else stated.get("quant_method") if isinstance(stated, dict) else None
    _check_method(values["quantization"], found, facts)
    blocks = _fp8_blocks(facts) is not None
    if found not in DEPRECATED and not blocks:
        return None
    if found not in UNDONE and not blocks:
        raise ConfigError(
            "--quantization",
            f"the weights are quantized by {found}, which is deprecated and runs on no CPU, with "
            "--allow-deprecated-quantization neither",
            "quantize the model to a GGUF file",
        )
    if not blocks and not values["allow-deprecated-quantization"]:
        raise ConfigError(
            "--allow-deprecated-quantization",
            f"the weights are quantized by {found}, which is deprecated: support for it may end",
            "give the option, or quantize the model to a GGUF file",
        )
    if format_ not in ("safetensors", "sharded_state", "dummy"):
        raise ConfigError("--load-format", f"{found} is read of safetensors, not of {format_}", "leave it at auto")
    return found


def _check_method(method: str | None, found: str | None, facts: ModelFacts) -> None:
    """Hold --quantization against what the files say."""
    known = found == "gguf" or found in DEPRECATED or _fp8_blocks(facts) is not None
    if method is None or (method == found and known):
        return
    if method == found:
        raise ConfigError("--quantization", f"{method} is not supported", "quantize the model to a GGUF file")
    quantized = "are not quantized" if found is None else f"are quantized by {found}"
    raise ConfigError(
        "--quantization", f"is {method}, but the weights of {facts.path} {quantized}", "leave it out: files say it"
    )


def _fp8_blocks(facts: ModelFacts) -> tuple[int, int] | None:
    """Rows and columns of the blocks that have a scale, where weights are quantized so, as DeepSeek-V3's are."""
    stated = facts.config.get("quantization_config")
    if not isinstance(stated, dict) or stated.get("quant_method") != "fp8" or stated.get("fmt", "e4m3") != "e4m3":
        return None
    match stated.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def _extra(given: Mapping[str, Any], format_: str) -> dict[str, Any]:
    option, known = "--model-loader-extra-config", EXTRA_KEYS[format_]
    for name, value in given.items():
        if name not in known:
            keys = f"its keys are {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"{option}.{name}", f"is no setting of the loader of {format_}", keys)
        kind = known[name]
        if type(value) is not kind or (isinstance(value, int) and value < 1 and kind is int):
            wanted = {bool: "true or false", int: "a positive integer", str: "a text"}[kind]
            raise ConfigError(f"{option}.{name}", f"{value!r} is not {wanted}")
    if not {"{rank}", "{part}"} <= set(re.findall(r"{.*?}", given.get("pattern", SHARDED_PATTERN))):
        raise ConfigError(f"{option}.pattern", f"{given['pattern']!r} lacks {{rank}} or {{part}}")
    if given.get("enable_multithread_load") is False and given.get("num_threads", 1) > 1:
        raise ConfigError(f"{option}.num_threads", "contradicts enable_multithread_load false", "give one of them")
    return dict(given)


def _threads(extra: Mapping[str, Any]) -> int:
    return int(extra.get("num_threads") or (DEFAULT_THREADS if extra.get("enable_multithread_load") else 1))


def _strategy(wanted: str | None, format_: str, files: "Files", hardware: Hardware) -> tuple[str, str]:
    option = "--safetensors-load-strategy"
    if wanted == "torchao":
        raise ConfigError(option, "rayllm does not rebuild the tensors of torchao", "use weights of another kind")
    if wanted is not None:
        if format_ not in SAFETENSORS:
            raise ConfigError(option, f"has no effect on weights that are {format_}", "leave it out")
        return wanted, ""
    fits = files.weight_bytes < PREFETCH_SHARE * hardware.memory
    if files.network_file_system is None or format_ not in SAFETENSORS or not fits:
        return "lazy", ""
    return "prefetch", f"turned on because they lie on a network file system, {files.network_file_system}"
