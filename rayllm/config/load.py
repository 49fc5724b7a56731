"""From option values to resolved settings, reading what has to be read: the model's facts, files, the machine."""

from collections.abc import Iterator
from dataclasses import replace

from rayllm.config.files import read_files
from rayllm.config.hardware import probe_hardware
from rayllm.config.hub import Places, locate
from rayllm.config.model_facts import ConfigSource, read_model_facts
from rayllm.config.observability import check_trace_packages
from rayllm.config.plan import plan_lines
from rayllm.config.registry import Values, registry
from rayllm.config.resolve import Resolved, resolve
from rayllm.config.states import check_states
from rayllm.model.families import FAMILIES, without_windows


def load(values: Values, api_key: str | None = None, dev_mode: bool = False) -> Resolved:
    """Resolve the options on this machine, where the model has been fetched to if it is on the hub.

    Takes a fraction of a second where it is here already, and loads no torch.

    Raises:
        ConfigError: an option cannot be honoured.
        ModelError: the model's files cannot be used.
    """
    hardware = probe_hardware()
    warnings = check_states(values, registry(), hardware)
    places = locate(values)
    facts = read_model_facts(places.model, _config_source(values, places))
    if values["disable-sliding-window"] and facts.architecture in FAMILIES:
        facts = without_windows(facts)
    resolved = resolve(values, facts, hardware, read_files(values, facts, places), api_key, dev_mode)
    check_trace_packages(resolved.serve.frontend.traces)
    return replace(
        resolved,
        notes=(*values.notes, *warnings, *resolved.notes, *_hub_notes(values, places)),
        plan=tuple(plan_lines(values, resolved, hardware)),
    )


def _hub_notes(values: Values, places: Places) -> Iterator[str]:
    for option in ("download-dir", "hf-token"):
        if option in values.given and not places.asked_hub:
            yield f"--{option} has no effect: nothing that the options name is on the hub"


def _config_source(values: Values, places: Places) -> ConfigSource:
    return ConfigSource(
        path=places.config,
        format=values["config-format"],
        overrides=values["hf-overrides"],
        trusted=values["trust-remote-code"],
    )
