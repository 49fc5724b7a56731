"""Which implementation runs a model: rayllm's own, or the modelling code of transformers. Pure."""

from rayllm.config.model_facts import ModelFacts
from rayllm.config.registry import Values
from rayllm.errors import ConfigError
from rayllm.model.families import FAMILIES

OWN, TRANSFORMERS = "rayllm", "transformers"


def resolve_model_impl(values: Values, facts: ModelFacts) -> str:
    """`rayllm` or `transformers`.

    Raises:
        ConfigError: the one that is asked for does not know the model, or another option needs rayllm's own.
    """
    wanted, known = values["model-impl"], facts.architecture in FAMILIES
    if wanted == "terratorch":
        raise ConfigError(
            "--model-impl", "TerraTorch's models make maps of satellite images, and rayllm serves text", "leave it out"
        )
    if wanted == "vllm" and not known:
        raise ConfigError(
            "--model-impl",
            f"vllm is rayllm's own implementation, which does not know {facts.architecture}",
            "leave it at auto, or take transformers",
        )
    if wanted == "vllm" or (wanted == "auto" and (known or facts.format == "gguf")):
        if values["code-revision"] is not None:
            raise ConfigError(
                "--code-revision", "rayllm's own implementation runs this model, not its code", "leave it out"
            )
        return OWN
    _check_others(values, facts)
    return TRANSFORMERS


def _check_others(values: Values, facts: ModelFacts) -> None:
    """Refuse what only rayllm's own implementation can do."""
    runs = f"transformers runs {facts.architecture}, and"
    if facts.format == "gguf":
        raise ConfigError("--model-impl", f"transformers is for Hugging Face folders, and {facts.path} is GGUF")
    if facts.config_file is not None and facts.config_file.endswith("params.json"):
        raise ConfigError("--config-format", f"{runs} it reads config.json only", "leave it out, or take hf")
    if values["disable-sliding-window"]:
        raise ConfigError("--disable-sliding-window", f"{runs} its code decides on windows", "leave it out")
    if values["disable-hybrid-kv-cache-manager"] is False:
        raise ConfigError(
            "--no-disable-hybrid-kv-cache-manager", f"{runs} all of its layers keep all tokens", "leave it out"
        )
    if values["kv-cache-dtype"] != "auto":
        raise ConfigError("--kv-cache-dtype", f"{runs} its cache holds the model's own type", "leave it at auto")
    if not values["disable-cascade-attn"]:
        raise ConfigError("--no-disable-cascade-attn", f"{runs} each request attends by itself", "leave it out")
    if values["enable-mfu-metrics"]:
        raise ConfigError("--enable-mfu-metrics", f"{runs} work is estimated of rayllm's own families", "leave it out")
    if values["ir-op-priority"]["rms_norm"]:
        raise ConfigError("--ir-op-priority.rms_norm", f"{runs} its code has norms of its own", "leave it out")
    if values["load-format"] in ("sharded_state", "runai_streamer_sharded", "mistral"):
        raise ConfigError(
            "--load-format", f"{runs} {values['load-format']} holds rayllm's or Mistral's own names", "leave it at auto"
        )
