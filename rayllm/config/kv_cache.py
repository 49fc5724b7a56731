"""How keys and values are stored: from options to frozen settings. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from rayllm.config.model_facts import ModelFacts
from rayllm.config.registry import Values
from rayllm.errors import ConfigError

LAYER_SCALED = ("fp8_e4m3", "fp8_e5m2")
"""Types that have a scale for all keys of a layer, and one for its values."""
HEAD_SCALED = ("int8_per_token_head", "fp8_per_token_head")
"""Types that have a scale, of four bytes, for each head of a token."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of the other types; those above take one byte."""
_SPELLINGS = {"auto": None, "fp8": "fp8_e4m3"}
_WINDOWS = "sliding_window"
_EIGHT_BITS = "choose fp8, fp8_e5m2, int8_per_token_head or fp8_per_token_head"
_REFUSED = {
    "bfloat16": (
        "'bfloat16' opts out of an fp8 cache, which this model does not have by default",
        "leave it out: auto is the model's type, which --dtype bfloat16 makes bfloat16",
    ),
    "fp8_inc": ("'fp8_inc' is for Intel Gaudi, which rayllm does not run on", _EIGHT_BITS),
    "fp8_ds_mla": ("'fp8_ds_mla' is a layout for CUDA kernels of latent attention", _EIGHT_BITS),
    "nvfp4": ("'nvfp4' needs an NVIDIA GPU that computes in it", _EIGHT_BITS),
    **{
        name: (f"{name!r} needs kernels for CUDA GPUs, which rayllm does not have", _EIGHT_BITS)
        for name in ("turboquant_3bit_nc", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_k8v4")
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheSettings:
    """How the layers of a model store keys and values."""

    dtype: str | None = None
    """`float16`, or one of `LAYER_SCALED` and `HEAD_SCALED`; None is the model's."""
    kept_layers: frozenset[int] = frozenset()
    """Layers that store the model's dtype all the same."""
    keeps_windows: bool = False
    """Whether all layers with a sliding window do too."""
    measures_scales: bool = False
    """Whether scales of layers come from the first step, and not from the checkpoint."""

    @property
    def mixes_types(self) -> bool:
        """Whether layers may differ in type."""
        return self.dtype is not None and bool(self.kept_layers or self.keeps_windows)

    def of_layer(self, index: int, window: int | None, model_dtype: str) -> str:
        """The type of one layer's cache."""
        kept = index in self.kept_layers or (self.keeps_windows and window is not None)
        return model_dtype if kept or self.dtype is None else self.dtype


def head_bytes(dtype: str, head_size: int) -> int:
    """Bytes of the keys, or the values, of one token and head."""
    return head_size * ITEM_BYTES.get(dtype, 1) + (4 if dtype in HEAD_SCALED else 0)


def resolve_kv_cache(values: Values, facts: ModelFacts) -> KvCacheSettings:
    """The settings that the options ask for.

    Raises:
        ConfigError: a type cannot be had on this platform, or what is to be left out is no layer.
    """
    wanted = values["kv-cache-dtype"]
    if wanted in _REFUSED:
        raise ConfigError("--kv-cache-dtype", *_REFUSED[wanted])
    names, layers = values["kv-cache-dtype-skip-layers"], facts.config.get("num_hidden_layers", 0)
    return KvCacheSettings(
        dtype=_SPELLINGS.get(wanted, wanted),
        kept_layers=frozenset(_layer(name, layers) for name in names if name != _WINDOWS),
        keeps_windows=_WINDOWS in names,
        measures_scales=values["calculate-kv-scales"],
    )


def kv_cache_notes(values: Values) -> Iterator[str]:
    """What the user should know of these options."""
    dtype = _SPELLINGS.get(values["kv-cache-dtype"], values["kv-cache-dtype"])
    if values["calculate-kv-scales"]:
        yield (
            "--calculate-kv-scales is deprecated: it measures scales in an engine's first step, and later results "
            "depend on what was in that; fp8_per_token_head has scales that fit each token"
        )
        if dtype not in LAYER_SCALED:
            yield "--calculate-kv-scales has no effect without --kv-cache-dtype fp8 or fp8_e5m2"
    if values["kv-cache-dtype-skip-layers"] and dtype is None:
        yield "--kv-cache-dtype-skip-layers has no effect: without --kv-cache-dtype all layers store the model's type"


def _layer(name: str, layers: int) -> int:
    if not name.isdecimal() or int(name) >= layers:
        raise ConfigError(
            "--kv-cache-dtype-skip-layers",
            f"{name!r} is neither a layer of this model nor a kind of layers",
            f"give numbers from 0 to {layers - 1}, or {_WINDOWS}",
        )
    return int(name)
