"""From option values to resolved settings, reading what has to be read: the model's facts, files, the machine."""

from rayllm.config.files import read_files
from rayllm.config.hardware import probe_hardware
from rayllm.config.model_facts import read_model_facts
from rayllm.config.registry import Values
from rayllm.config.resolve import Resolved, resolve
from rayllm.errors import ConfigError


def load(values: Values, api_key: str | None = None) -> Resolved:
    """Resolve the options on this machine. Takes a fraction of a second, and loads no torch.

    Raises:
        ConfigError: an option cannot be honoured.
        ModelError: the model's files cannot be used.
    """
    if values["model"] is None:
        raise ConfigError("--model", "is missing", "name a model folder or a GGUF file")
    facts = read_model_facts(values["model"])
    return resolve(values, facts, probe_hardware(), read_files(values, facts), api_key)
