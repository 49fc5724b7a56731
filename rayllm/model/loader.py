"""From a model's files to a `Decoder` whose parameters are filled, rank by rank and tensor by tensor."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import nn

from rayllm.config.model_facts import ModelFacts
from rayllm.errors import ModelError
from rayllm.model.checkpoint import Checkpoint, open_folder
from rayllm.model.decoder import Decoder
from rayllm.model.families import config_file, spec_of
from rayllm.model.gguf import gguf_names, open_gguf
from rayllm.model.layers import Layer, Norm, Placement, SplitNorm, Stored
from rayllm.model.spec import DecoderSpec, WeightNames
from rayllm.parallel.group import Group, SingleGroup
from rayllm_kernels import Needs, select

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, after each tensor."""

_IGNORED_ENDINGS = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints hold and the config determines."""


def load_model(
    facts: ModelFacts,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None = None,
    load_format: LoadFormat = "auto",
    progress: Progress | None = None,
    max_model_len: int | None = None,
    keeps: frozenset[str] = frozenset(),
    seed: int = 0,
) -> Decoder:
    """Make this rank's share of a model, ready for `torch.inference_mode`.

    `dummy` fills it with random weights drawn from `seed` and reads no weight file. `max_model_len` is the longest
    context that will be served (by default what the facts allow); kinds of rope that depend on length are set by it.
    Matrices of the quantized kinds in `keeps` are left as they are stored, for `CompiledDecoder`; the decoder by itself
    cannot run then.

    Raises:
        ModelError: the architecture is unknown, or a file is missing, damaged, or does not fit it.
        ConfigError: the ranks cannot divide the model.
    """
    spec = spec_of(facts)
    place = Placement(select(device.type, needs_of(spec, dtype)), dtype, device, group or SingleGroup(), keeps)
    model = Decoder(spec, place, max_model_len or facts.max_model_len)
    if load_format == "dummy":
        _fill_randomly(model, seed)
    else:
        fill(model, *_open(facts, spec, dtype), progress)
    return model.eval()


def needs_of(spec: DecoderSpec, dtype: torch.dtype) -> Needs:
    """What a model asks of its operations."""
    return Needs(dtype=dtype, head_size=spec.head_size, soft_cap=spec.attention_soft_cap is not None)


def _open(facts: ModelFacts, spec: DecoderSpec, dtype: torch.dtype) -> tuple[Checkpoint, WeightNames]:
    if facts.format == "gguf":
        return open_gguf(facts, dtype), gguf_names(facts)
    if facts.config.get("quantization_config"):
        raise ModelError(config_file(facts), "quantization_config: quantized checkpoints are not supported")
    return open_folder(facts.path), spec.names


def fill(model: Decoder, checkpoint: Checkpoint, names: WeightNames, progress: Progress | None = None) -> None:
    """Copy a checkpoint into a model's parameters, after checking that names and shapes match.

    Raises:
        ModelError: a tensor is missing, superfluous, of the wrong shape, or cannot be read.
    """
    targets = dict(_targets(model, names, checkpoint))
    for name in checkpoint.tensors:
        if name not in targets and not _ignorable(name, model, names):
            raise ModelError(checkpoint.tensors[name].file, "the architecture has no place for it", name)
    for name, (layer, kind, parts) in targets.items():
        if name not in checkpoint.tensors:
            raise ModelError(checkpoint.file_for(name), "missing", name)
        stored, expected = checkpoint.tensors[name], layer.stored_shape(kind, parts)
        if stored.shape != expected:
            raise ModelError(
                stored.file, f"shape {list(stored.shape)}, where the config makes it {list(expected)}", name
            )
    total = sum(checkpoint.tensors[name].nbytes for name in targets)
    done = 0
    with torch.no_grad():
        for name, (layer, kind, parts) in targets.items():
            stored = checkpoint.tensors[name]
            layer.fill(kind, parts, stored)
            done += stored.nbytes
            if progress is not None:
                progress(done, total)


Target = tuple[Layer, str, tuple[str, ...]]
"""Where a tensor goes: a layer, `weight` or `bias`, and the parts of it."""


def _targets(model: Decoder, names: WeightNames, checkpoint: Checkpoint) -> Iterator[tuple[str, Target]]:
    """Every tensor that a checkpoint must hold, and where it goes."""
    prefix = _used_prefix(names.prefixes, checkpoint.tensors)
    head_prefix = _used_prefix([f"{p}lm_head" for p in names.head_prefixes], checkpoint.tensors).removesuffix("lm_head")
    for stem, place in names.top.items():
        if place == "head" and model.spec.tied:
            continue
        yield from _at(model, f"{head_prefix if place == 'head' else prefix}{stem}", place)
    for i in range(model.spec.num_layers):
        for stem, place in names.layer.items():
            yield from _at(model.layers[i], prefix + stem.format(i=i), place)


def _at(root: nn.Module, stem: str, place: str) -> Iterator[tuple[str, Target]]:
    path, _, parts = place.partition(":")
    layer = root
    for step in path.split("."):
        layer = getattr(layer, step)
    if layer is None:
        return
    assert isinstance(layer, Layer), place
    for kind in layer.kinds:
        yield f"{stem}.{kind}", (layer, kind, tuple(parts.split("+")))


def _used_prefix(prefixes: tuple[str, ...] | list[str], tensors: Mapping[str, Stored]) -> str:
    """The first prefix that any tensor begins with, else the first."""
    return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in tensors)), prefixes[0])


def _ignorable(name: str, model: Decoder, names: WeightNames) -> bool:
    if model.spec.tied and name.endswith("lm_head.weight"):
        return True
    return name.endswith(_IGNORED_ENDINGS) or name.startswith(names.ignored)


def _fill_randomly(model: Decoder, seed: int) -> None:
    """Weights as at the start of a training: small, norms neutral."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, Norm | SplitNorm):
                    parameter.fill_(0.0 if module.plus_one else 1.0)
                else:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
