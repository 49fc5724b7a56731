"""From a model's files to a `Decoder` whose parameters are filled, rank by rank and tensor by tensor."""

import logging
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from rayllm.config.kv_cache import KvCacheSettings
from rayllm.config.model_facts import ModelFacts
from rayllm.config.weight_files import WeightFiles, find_weight_files, rank_files
from rayllm.config.weights import SAFETENSORS, WeightsConfig
from rayllm.errors import ModelError
from rayllm.kv.layout import KVLayout
from rayllm.model.checkpoint import Checkpoint, LoadedTensor, open_safetensors
from rayllm.model.decoder import Decoder
from rayllm.model.families import config_file, spec_of
from rayllm.model.fp8 import block_scaled, scaled
from rayllm.model.gguf import gguf_names, open_gguf
from rayllm.model.layers import ColumnLinear, Layer, Norm, Placement, SplitNorm, Stored
from rayllm.model.mistral import MISTRAL_NAMES, in_our_order
from rayllm.model.moe import Experts, HeldOf, OneExpert
from rayllm.model.pickled import open_numpy_cache, open_pickled
from rayllm.model.spec import DecoderSpec, WeightNames
from rayllm.model.streamed import open_streamed, open_tensorized
from rayllm.parallel.ranks import Ranks
from rayllm_kernels import Needs, select

log = logging.getLogger(__name__)

_IGNORED_ENDINGS = ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq", "self_attn.q_scale", "attn.attn.q_scale")
"""Buffers that old checkpoints hold and the config determines; and scales of queries, which are not rounded here."""
_OF_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.")
_SHARDED = ("sharded_state", "runai_streamer_sharded")


def load_model(
    facts: ModelFacts,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks | None = None,
    weights: WeightsConfig | None = None,
    max_model_len: int | None = None,
    keeps: frozenset[str] = frozenset(),
    seed: int = 0,
    layout: KVLayout | None = None,
    kv_cache: KvCacheSettings | None = None,
    first: Mapping[str, Sequence[str]] | None = None,
    held: HeldOf | None = None,
) -> Decoder:
    """Make a process's share of a model, ready for `torch.inference_mode`: all of it, or what `ranks` says.

    `weights` says how they are read; its format `dummy` fills the model with random ones drawn from `seed`, and reads
    no file. `max_model_len` is the longest context that will be served (by default what the facts allow); kinds of rope
    that depend on length are set by it. Matrices of the quantized kinds in `keeps` are left as they are stored, for
    `CompiledDecoder`; the decoder by itself cannot run then. `layout` says which layers share KV blocks; without one
    all of them do. `first` names implementations of operations to try first. `held` says which experts this rank
    holds whole; without it, ranks divide each.

    Raises:
        ModelError: the architecture is unknown, or a file is missing, damaged, or does not fit it.
        ConfigError: the ranks cannot divide the model, or an option about its files cannot be honoured.
    """
    began = time.monotonic()
    spec, weights, ranks = spec_of(facts), weights or WeightsConfig(), ranks or Ranks()
    ops = select(device.type, needs_of(spec, dtype, kv_cache), first=first)
    place = Placement(ops, dtype, device, ranks, keeps)
    model = Decoder(spec, place, max_model_len or facts.max_model_len, layout, kv_cache, held)
    if weights.format == "dummy":
        _fill_randomly(model, seed)
        log.info("%d layers of random weights, as %s", len(model.layers), dtype)
        return model.eval()
    checkpoint, files = open_weights(facts, weights, dtype, ranks.tensor.rank)
    weights, names = replace(weights, format=files.format), _names(facts, spec, files.format)
    own = weights.format in _SHARDED
    targets = dict(_own_targets(model, checkpoint) if own else _targets(model, names, checkpoint))
    _check(targets, checkpoint, partial(_ignorable, model=model, names=names, facts=facts))
    fill(targets, checkpoint, weights.threads, weights.show_progress and ranks.tensor.rank == 0)
    log.info(
        "read %d layers from %d files of %s%s in %.1f s, as %s",
        len(model.layers), len(files.paths), weights.format, _described(weights), time.monotonic() - began, dtype,
    )  # fmt: skip
    return model.eval()


def needs_of(spec: DecoderSpec, dtype: torch.dtype, kv_cache: KvCacheSettings | None = None) -> Needs:
    """What a model asks of its operations."""
    return Needs(
        dtype=dtype,
        head_size=spec.head_size,
        soft_cap=spec.attention_soft_cap is not None,
        sinks=spec.sinks,
        cache_of_its_own=kv_cache is not None and kv_cache.dtype is not None,
    )


def _names(facts: ModelFacts, spec: DecoderSpec, format_: str) -> WeightNames:
    """How the files of a format name a model's tensors."""
    if format_ == "gguf":
        return gguf_names(facts)
    return MISTRAL_NAMES if format_ == "mistral" else spec.names


def _described(weights: WeightsConfig) -> str:
    """How they were read, in words."""
    parts = []
    if weights.format in SAFETENSORS:
        why = f" ({weights.strategy_reason})" if weights.strategy_reason else ""
        parts.append(f"strategy {weights.strategy}{why}")
    if weights.threads > 1:
        parts.append(f"{weights.threads} threads")
    parts += [f"{name} {value}" for name, value in weights.extra.items()]
    return f" with {', '.join(parts)}" if parts else ""


def _files(facts: ModelFacts, weights: WeightsConfig, rank: int) -> WeightFiles:
    if facts.config.get("quantization_config") and weights.quantization is None:
        raise ModelError(config_file(facts), "quantization_config: quantized checkpoints are not supported")
    if facts.format == "gguf":
        return find_weight_files(facts.path)
    if weights.extra.get("tensorizer_uri"):
        return WeightFiles(format=weights.format, paths=(), origin=weights.extra["tensorizer_uri"])
    if weights.format in _SHARDED:
        return replace(rank_files(facts.path, weights.pattern, rank), format=weights.format)
    return find_weight_files(facts.path, weights.format, weights.ignored)


def open_weights(
    facts: ModelFacts, weights: WeightsConfig, dtype: torch.dtype, rank: int = 0
) -> tuple[Checkpoint, WeightFiles]:
    """The tensors of a model, and the files that hold them.

    Raises:
        ModelError: a file is missing or damaged, or the weights are quantized in a way that is not supported.
        ConfigError: an option about the files cannot be honoured.
    """
    files = _files(facts, weights, rank)
    checkpoint = _open(facts, files, replace(weights, format=files.format), dtype)
    if weights.quantization == "fbgemm_fp8":
        checkpoint = scaled(checkpoint)
    elif weights.quantization == "fp8":
        checkpoint = block_scaled(checkpoint, weights.quantized_blocks)
    return checkpoint, files


def _open(facts: ModelFacts, files: WeightFiles, weights: WeightsConfig, dtype: torch.dtype) -> Checkpoint:
    match files.format:
        case "gguf":
            return open_gguf(facts, dtype)
        case "mistral":
            return in_our_order(open_safetensors(files, weights), facts)
        case "pt":
            return open_pickled(files, weights)
        case "npcache":
            return open_numpy_cache(facts.path, files, weights)
        case "tensorizer":
            return open_tensorized(files, weights)
        case "runai_streamer" | "runai_streamer_sharded":
            return open_streamed(files, weights)
    return open_safetensors(files, weights)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor goes."""

    shape: tuple[int, ...]
    """That a checkpoint must store it in."""
    fill: Callable[[Stored], None]


def _check(targets: Mapping[str, Target], checkpoint: Checkpoint, ignorable: Callable[[str], bool]) -> None:
    """Raise a ModelError unless the checkpoint has what the model needs, and nothing that it has no place for."""
    for name in checkpoint.tensors:
        if name not in targets and not ignorable(name):
            raise ModelError(checkpoint.tensors[name].file, "the architecture has no place for it", name)
    for name, target in targets.items():
        if name not in checkpoint.tensors:
            raise ModelError(checkpoint.file_for(name), "missing", name)
        stored = checkpoint.tensors[name]
        if stored.shape != target.shape:
            raise ModelError(
                stored.file, f"shape {list(stored.shape)}, where the config makes it {list(target.shape)}", name
            )


class _Bar(tqdm):
    """A progress bar without the thread that tqdm keeps for slow ones."""

    monitor_interval = 0


def fill(targets: Mapping[str, Target], checkpoint: Checkpoint, threads: int, show_progress: bool) -> None:
    """Copy a checkpoint into a model's parameters, file by file, with a progress bar over the files."""
    left = Counter(checkpoint.tensors[name].file for name in targets)
    source = checkpoint.stream() if checkpoint.stream is not None else iter(checkpoint.tensors.items())

    def put(item: tuple[str, Any]) -> str:
        name, stored = item
        with torch.no_grad():
            targets[name].fill(stored)
        file: str = stored.file
        return file

    wanted = (item for item in source if item[0] in targets)
    # In this thread where there is one: torch's number of threads is a thread's own setting.
    with (
        _Bar(desc="Loading weights", total=len(left), unit="file", file=sys.stderr, disable=not show_progress) as bar,
        ThreadPoolExecutor(threads) as pool,
    ):
        done: Iterable[str] = map(put, wanted) if threads == 1 else pool.map(put, wanted)
        for file in done:
            left[file] -= 1
            if not left[file]:
                bar.update()


def _own_targets(model: Decoder, checkpoint: Checkpoint) -> Iterator[tuple[str, Target]]:
    """A rank's own parameters, under their own names."""

    def fill(parameter: Tensor, stored: Stored) -> None:
        parameter.copy_(stored.read(slice(None)))

    for name, parameter in own_parameters(model):
        yield name, Target(tuple(parameter.shape), partial(fill, parameter))
    for name, scales_2 in kv_scales_of(model):
        if name in checkpoint.tensors:
            yield name, Target((2,), partial(fill, scales_2))


def own_parameters(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """What a rank holds, under the model's own names."""
    for name, parameter in model.named_parameters():
        yield _of_whole(name, model), parameter


def kv_scales_of(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The scales of each layer's cache, under the model's own names."""
    for name, buffer in model.named_buffers():
        if name.endswith(".kv_scales_2"):
            yield _of_whole(name, model), buffer


def _of_whole(name: str, model: Decoder) -> str:
    """A name with the number of its layer in the whole model, for that in this stage."""
    return re.sub(r"^layers\.(\d+)", lambda match: f"layers.{model.numbers[int(match[1])]}", name)


def _targets(model: Decoder, names: WeightNames, checkpoint: Checkpoint) -> Iterator[tuple[str, Target]]:
    """Every tensor that a checkpoint must hold, and where it goes."""
    prefix = _used_prefix(names.prefixes, checkpoint.tensors)
    head_prefix = _used_prefix([f"{p}lm_head" for p in names.head_prefixes], checkpoint.tensors).removesuffix("lm_head")
    for stem, place in names.top.items():
        if place == "head" and model.spec.tied:
            continue
        yield from _at(model, f"{head_prefix if place == 'head' else prefix}{stem}", place)
    for i, layer in zip(model.numbers, model.layers, strict=True):
        for stem, place in names.layer.items():
            numbers = range(model.spec.moe.num_experts if model.spec.moe is not None else 0) if "{e}" in stem else (0,)
            for e in numbers:
                yield from _at(layer, prefix + stem.format(i=i, e=e), place.format(e=e))
            if place == "attention.out":
                attention = prefix + stem.format(i=i).rpartition(".")[0]
                yield from _scales(layer.attention.kv_scales_2, attention, checkpoint)


def _scales(scales_2: Tensor, attention: str, checkpoint: Checkpoint) -> Iterator[tuple[str, Target]]:
    """The scales of a layer's cache, if a checkpoint holds them: a number for the keys and one for the values."""

    def fill(which: int, stored: Stored) -> None:
        scale = stored.read(slice(None)).float().view(())
        if not (scale > 0 and scale.isfinite()):
            raise ModelError(stored.file, f"must be a positive number, not {float(scale)}", stored.name)
        scales_2[which] = scale

    for which, letter in enumerate("kv"):
        for ending in (f"{letter}_scale", f"attn.{letter}_scale", f"{letter}_proj.{letter}_scale"):
            name = f"{attention}.{ending}"
            if name in checkpoint.tensors:
                shape = checkpoint.tensors[name].shape
                yield name, Target(shape if shape == () else (1,), partial(fill, which))


def _at(root: nn.Module, stem: str, place: str) -> Iterator[tuple[str, Target]]:
    """The tensors for a place of `WeightNames`; none if the model has no such module."""
    place, _, named = place.partition("@")
    path, _, parts = place.partition(":")
    layer: Any = root
    for step in path.split("."):
        layer = layer.expert(int(step)) if isinstance(layer, Experts) else getattr(layer, step, None)
    if layer is None:
        return
    assert isinstance(layer, Layer | OneExpert), place
    split = tuple(parts.split("+"))
    for kind in layer.named if named else layer.kinds:
        if named in ("", kind):
            name = stem if named else f"{stem}.{kind}"
            yield name, Target(layer.stored_shape(kind, split), partial(layer.fill, kind, split))


def _used_prefix(prefixes: tuple[str, ...] | list[str], tensors: Mapping[str, Stored]) -> str:
    """The first prefix that any tensor begins with, else the first."""
    return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in tensors)), prefixes[0])


def _ignorable(name: str, model: Decoder, names: WeightNames, facts: ModelFacts) -> bool:
    layer = _OF_LAYER.search(name)
    if layer is not None and _is_beyond(int(layer[1]), model.spec.num_layers, facts):
        return True
    if model.ranks.stages > 1 and (layer is None or int(layer[1]) not in model.numbers):
        return True  # another stage's
    if model.spec.tied and name.endswith("lm_head.weight"):
        return True
    return name.endswith(_IGNORED_ENDINGS) or name.startswith(names.ignored)


def _is_beyond(layer: int, layers: int, facts: ModelFacts) -> bool:
    """Whether a layer is not of the decoder: cut off by an override, or one that predicts tokens further ahead."""
    ahead = facts.config.get("num_nextn_predict_layers")
    end = layers + ahead if isinstance(ahead, int) else layers
    return layer >= layers and ("num_hidden_layers" in facts.overrides or layer < end)


def _fill_randomly(model: Decoder, seed: int) -> None:
    """Weights as at the start of a training: small, norms neutral. However the model is divided, it is the same."""
    for path, layer in model.named_modules():
        if not isinstance(layer, Layer):
            continue
        parts = tuple(layer.parts) if isinstance(layer, ColumnLinear) else ("",)
        for kind in layer.kinds:
            name, shape = f"{_of_whole(path, model)}.{kind}", layer.stored_shape(kind, parts)
            if isinstance(layer, Norm | SplitNorm):
                values = torch.full(shape, 0.0 if layer.plus_one else 1.0)
            else:
                generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
                values = torch.randn(shape, generator=generator) * 0.02
            with torch.no_grad():
                layer.fill(kind, parts, LoadedTensor("", name, values))
