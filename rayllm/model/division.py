"""Whether ranks and stages can divide a model: asked before anything starts, and by each rank. Free of torch."""

from rayllm.config.engine import EngineConfig
from rayllm.config.model_impl import TRANSFORMERS
from rayllm.errors import ConfigError
from rayllm.model.spec import DecoderSpec


def check_division(spec: DecoderSpec, ranks: int, stages: int) -> None:
    """Refuse to leave a rank without a head or a part of an MLP or of the vocabulary, or a stage without a layer.

    Raises:
        ConfigError: names the option.
    """
    rows, moe = -(-spec.vocab_size // ranks), spec.moe
    widths = (spec.intermediate_size, *((moe.intermediate_size, moe.shared_size) if moe is not None else ()))
    inner = min(width for width in widths if width)
    if ranks > min(spec.num_heads, inner) or (ranks - 1) * rows >= spec.vocab_size:
        raise ConfigError(
            "--tensor-parallel-size",
            f"{ranks} ranks cannot divide {spec.num_heads} query heads, an inner width of {inner} and "
            f"{spec.vocab_size} tokens of the vocabulary",
            "each needs one of all three at least: lower it",
        )
    if stages > spec.num_layers:
        raise ConfigError(
            "--pipeline-parallel-size", f"{stages} stages cannot divide {spec.num_layers} layers", "lower it"
        )


def check_undivided(config: EngineConfig) -> None:
    """Refuse to divide a model that runs by the code of transformers.

    Raises:
        ConfigError: names the option.
    """
    settings = config.parallel
    if config.model_impl == TRANSFORMERS and settings.size > 1:
        raise ConfigError(
            "--tensor-parallel-size" if settings.tensor > 1 else "--pipeline-parallel-size",
            f"{config.model.architecture} runs by the code of transformers, which is not divided",
            "leave it at 1, and use --data-parallel-size",
        )
