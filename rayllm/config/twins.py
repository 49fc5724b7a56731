"""Settings with two spellings: an option of their own, and a key of an option that holds many."""

from collections.abc import Mapping
from typing import Any

from rayllm.errors import ConfigError

TWINS = (
    ("reasoning-parser", "reasoning-config", "reasoning_parser"),
    ("reasoning-parser", "structured-outputs-config", "reasoning_parser"),
    ("reasoning-parser-plugin", "structured-outputs-config", "reasoning_parser_plugin"),
    ("attention-backend", "attention-config", "backend"),
    ("moe-backend", "kernel-config", "moe_backend"),
    ("ir-op-priority", "kernel-config", "ir_op_priority"),
    ("enable-flashinfer-autotune", "kernel-config", "enable_flashinfer_autotune"),
    ("cudagraph-capture-sizes", "compilation-config", "cudagraph_capture_sizes"),
    ("max-cudagraph-capture-size", "compilation-config", "max_cudagraph_capture_size"),
)
"""(option, option that holds many, key)."""


def unify(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given values, with each such setting under both its spellings.

    Raises:
        ConfigError: two spellings of one setting differ.
    """
    unified = {name: dict(value) if isinstance(value, dict) else value for name, value in given.items()}
    for name, many, key in TWINS:
        holder = given.get(many) or {}
        if holder.get(key) is not None:
            if name in unified and unified[name] != holder[key]:
                raise ConfigError(
                    f"--{name}", f"is {unified[name]!r}, but --{many}.{key} is {holder[key]!r}", "give one of them"
                )
            unified[name] = holder[key]
        elif unified.get(name) is not None:
            unified[many] = {**(unified.get(many) or {}), key: unified[name]}
    return unified
