"""From a model's folder to a `TransformersDecoder`: the class that transformers or the model itself brings, filled.

Weights are read as for rayllm's own decoder, so that the options about them hold, and given to `from_pretrained`, which
knows how older checkpoints of a class are named.
"""

import json
import logging
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayllm.config.engine import EngineConfig
from rayllm.config.model_facts import ModelFacts
from rayllm.errors import ConfigError, ModelError
from rayllm.model.checkpoint import Checkpoint, is_floating
from rayllm.model.families import config_file
from rayllm.model.layers import Stored
from rayllm.model.loader import Target, fill, open_weights
from rayllm.model.transformers_decoder import ATTENTION, TransformersDecoder, attend
from rayllm_kernels import Needs, explain, select
from rayllm_kernels.native.library import Machine
from rayllm_kernels.native.ops import NativeOps
from rayllm_kernels.table import choose

log = logging.getLogger(__name__)

_ROPE_OVERRIDES = ("rope_parameters", "rope_scaling", "rope_theta")
_GROWING_ROPES = ("dynamic", "longrope")
"""Kinds whose angles transformers takes from the longest request of a step."""


def load_transformers(
    config: EngineConfig, dtype: torch.dtype, device: torch.device, threads: int, compiled: bool
) -> TransformersDecoder:
    """Make the model of `config`, ready for steps. `compiled` has the kernels do products and attention.

    Raises:
        ModelError: transformers does not know the model, its code cannot run over a paged cache, or a file is missing,
            damaged, or does not fit it.
        ConfigError: the context that is wanted is longer than the model's positions.
    """
    from transformers import AttentionInterface
    from transformers.utils import logging as their_logging

    began, facts = time.monotonic(), config.model
    their_logging.disable_progress_bar()
    AttentionInterface.register(ATTENTION, attend)
    file = config_file(facts)
    try:
        own, cls = _classes(facts, config.code)
        theirs = own.from_dict(_config_values(facts))
        _check(cls, theirs, config)
        model = _filled(cls, theirs, config, dtype)
    except (ModelError, ConfigError):
        raise
    except Exception as error:  # the code of a model may raise anything
        raise ModelError(file, f"transformers cannot make the model: {error}") from error
    model.to(device).eval().requires_grad_(False)
    origin = f"transformers, with code of {config.code}" if _is_own(cls) else "transformers"
    took = time.monotonic() - began
    log.info("model implementation: %s (%s), read in %.1f s as %s", cls.__name__, origin, took, dtype)
    if compiled:
        log.info("operations for cpu: compiled kernels for products and attention")
        return TransformersDecoder(model, NativeOps(threads), Machine(threads), file)
    needs = Needs(dtype=dtype)
    log.info("operations for %s: %s", device.type, explain(choose(device.type, needs)))
    return TransformersDecoder(model, select(device.type, needs), None, file)


def _classes(facts: ModelFacts, code: str | None) -> tuple[Any, Any]:
    """(class of the config, class of the model)."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    named = facts.config.get("auto_map") if code is not None else None
    references = named if isinstance(named, dict) else {}

    def own(name: str) -> Any:
        reference = references.get(name)
        if reference is None:
            return None
        # The repository that it names is where `code` was fetched from.
        return get_class_from_dynamic_module(str(reference).rpartition("--")[2], str(code))

    kind = facts.config.get("model_type")
    config = own("AutoConfig") or transformers.CONFIG_MAPPING[kind]
    return config, own("AutoModelForCausalLM") or getattr(transformers, facts.architecture)


def _is_own(cls: Any) -> bool:
    return not cls.__module__.startswith("transformers.")


def _config_values(facts: ModelFacts) -> dict[str, Any]:
    """The config as its file has it, with the values that an option changed."""
    values: dict[str, Any] = json.loads(Path(config_file(facts)).read_text(encoding="utf-8"))
    values.pop("quantization_config", None)  # ours to undo, as the weights are read
    changed = {name for name in facts.overrides if name not in _ROPE_OVERRIDES}
    if len(changed) < len(facts.overrides):
        changed.add("rope_parameters")
        values.pop("rope_scaling", None)
    if "num_hidden_layers" in changed and "layer_types" in values:
        changed.add("layer_types")
    return {**values, **{name: facts.config[name] for name in changed if name in facts.config}}


def _check(cls: Any, theirs: Any, config: EngineConfig) -> None:
    """Refuse what is known not to run over a paged cache, before the weights are read."""
    file = config_file(config.model)
    if cls._is_stateful:
        raise ModelError(file, f"{cls.__name__} keeps a state beside keys and values, which has no pages")
    if not cls._can_set_attn_implementation():
        raise ModelError(file, f"the code of {cls.__name__} does not let attention be exchanged")
    rope = getattr(theirs, "rope_parameters", None) or {}
    for one in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        if one.get("rope_type") in _GROWING_ROPES:
            reason = f"rope_type {one['rope_type']!r} makes a token's angles depend on others in its step"
            raise ModelError(file, f"{reason}, as transformers computes them")
    positions = getattr(theirs, "max_position_embeddings", None)
    if not rope and isinstance(positions, int) and config.max_model_len > positions:
        raise ConfigError(
            "--max-model-len", f"{config.max_model_len} is more than the model's {positions} positions", "lower it"
        )


def _filled(cls: Any, theirs: Any, config: EngineConfig, dtype: torch.dtype) -> Any:
    """The model with its weights."""
    facts, weights = config.model, config.weights
    if weights.format == "dummy":
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            return cls._from_config(theirs, dtype=dtype, attn_implementation=ATTENTION)
    checkpoint, _ = open_weights(facts, weights, dtype)
    state = _read(checkpoint, weights.threads, weights.show_progress, facts, theirs)
    model, told = cls.from_pretrained(
        None, config=theirs, state_dict=state, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True
    )
    for name in sorted(told["missing_keys"]):
        raise ModelError(checkpoint.file_for(name), "missing", name)
    if unused := sorted(told["unexpected_keys"]):
        # Buffers of older versions of the class, mostly, which transformers itself passes over.
        log.warning("%s has no place for %d tensors, such as %s", cls.__name__, len(unused), unused[0])
    return model


_OF_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def _read(checkpoint: Checkpoint, threads: int, progress: bool, facts: ModelFacts, theirs: Any) -> dict[str, Tensor]:
    """All tensors but what older checkpoints hold beside weights, and layers that an option cuts off."""
    state: dict[str, Tensor] = {}
    layers = theirs.get_text_config().num_hidden_layers if "num_hidden_layers" in facts.overrides else None

    def put(name: str, stored: Stored) -> None:
        # A streamed tensor is only there until the next one comes.
        tensor = stored.read(slice(None))
        state[name] = tensor.clone() if checkpoint.stream is not None else tensor

    targets = {}
    for name, stored in checkpoint.tensors.items():
        layer = _OF_LAYER.search(name)
        cut = layers is not None and layer is not None and int(layer[1]) >= layers
        if is_floating(stored) and not cut:
            targets[name] = Target(stored.shape, partial(put, name))
    fill(targets, checkpoint, threads, progress)
    return state
