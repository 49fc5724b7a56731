"""What the options of structured outputs come to."""

import importlib.util

from rayllm.config.engine import StructuredSettings
from rayllm.config.registry import Values
from rayllm.errors import ConfigError

OPTION = "--structured-outputs-config"
PACKAGES = {"guidance": "llguidance", "xgrammar": "xgrammar", "outlines": "outlines_core"}
"""The package of each library."""


def structured_settings(values: Values) -> StructuredSettings:
    """How outputs are held to a form, where requests do not say.

    Raises:
        ConfigError: the library is unknown, not installed, or cannot do what is asked of it.
    """
    given = values["structured-outputs-config"]
    backend = given["backend"]
    if backend not in ("auto", *PACKAGES):
        raise ConfigError(f"{OPTION}.backend", f"{backend!r} is unknown", f"choose auto, {', '.join(PACKAGES)}")
    if backend != "auto" and not installed(backend):
        name = PACKAGES[backend].replace("_", "-")
        raise ConfigError(f"{OPTION}.backend", f"the package {name} is not installed", f"pip install {name}")
    if given["disable_any_whitespace"] and backend == "outlines":
        raise ConfigError(f"{OPTION}.disable_any_whitespace", "outlines cannot do it", "choose guidance or xgrammar")
    return StructuredSettings(
        backend=backend,
        disable_any_whitespace=given["disable_any_whitespace"],
        disable_additional_properties=given["disable_additional_properties"],
        enable_in_reasoning=given["enable_in_reasoning"],
    )


def installed(backend: str) -> bool:
    """Whether the package of a library is there."""
    return importlib.util.find_spec(PACKAGES[backend]) is not None
