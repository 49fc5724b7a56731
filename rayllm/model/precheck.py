"""What can be told of a model that will not load, in milliseconds and without torch: asked before Ray is started."""

import json
import struct
from pathlib import Path

from rayllm.config.engine import EngineConfig
from rayllm.config.model_impl import TRANSFORMERS
from rayllm.config.weight_files import find_weight_files
from rayllm.errors import ConfigError, ModelError
from rayllm.model.division import check_division, check_undivided
from rayllm.model.families import FAMILIES, config_file, spec_of

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_PREFIX = struct.Struct("<Q")


def check_model(config: EngineConfig) -> None:
    """Refuse a model that engines would refuse later, each with a trace: an unknown family, or files cut short.

    Raises:
        ModelError: names the file.
        ConfigError: the model needs code of its own that may not be run, or workers cannot divide it.
    """
    check_undivided(config)
    if config.model_impl == TRANSFORMERS:
        _check_known(config)
    else:
        check_division(spec_of(config.model), config.parallel.tensor, config.parallel.stages)
    weights = config.weights
    if config.model.format == "hf" and weights.format != "dummy" and "tensorizer_uri" not in weights.extra:
        try:
            files = find_weight_files(config.model.path, weights.format, weights.ignored).paths
        except ModelError:
            return  # Weights may lie where the engines run.
        for file in files:
            if file.suffix == ".safetensors" and file.is_file():
                _check_length(file)


def _check_known(config: EngineConfig) -> None:
    """Refuse a model that neither transformers nor code of its own implements."""
    facts = config.model
    code = (facts.config.get("auto_map") or {}).get("AutoModelForCausalLM")
    if code and config.code is not None:
        return
    import transformers  # names only: classes are loaded when they are used

    architecture = facts.architecture
    known, causal = architecture in dir(transformers), architecture.endswith(_CAUSAL)
    if known and causal:
        return
    if code:
        raise ConfigError(
            "--trust-remote-code", f"{architecture} is implemented by the model's own code, {code}",
            "give the option if you trust it",
        )  # fmt: skip
    if known:
        raise ModelError(config_file(facts), f"architecture {architecture!r} is no language model of text alone")
    raise ModelError(
        config_file(facts),
        f"architecture {architecture!r} is not supported: rayllm has {', '.join(sorted(FAMILIES))}, and transformers "
        f"{transformers.__version__} does not know it",
    )


def _check_length(file: Path) -> None:
    """Compare a safetensors file's length with what its header promises."""
    try:
        with file.open("rb") as stream:
            (header_bytes,) = _PREFIX.unpack(stream.read(_PREFIX.size))
            have = file.stat().st_size
            if header_bytes > have - _PREFIX.size:
                raise ModelError(str(file), "truncated: it ends within its header; fetch it again")
            header = json.loads(stream.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        need = _PREFIX.size + header_bytes + max(ends, default=0)
    except (OSError, ValueError, AttributeError, KeyError, IndexError, TypeError, struct.error) as e:
        raise ModelError(str(file), f"not a safetensors file: {e}; fetch it again") from e
    if have < need:
        raise ModelError(str(file), f"truncated: it has {have} of {need} bytes; fetch it again")
