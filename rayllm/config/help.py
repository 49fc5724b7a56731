"""`--help`, derived from the declarations."""

import textwrap
from collections.abc import Iterator

from rayllm.config.option import Kind, Option
from rayllm.config.registry import Registry

WIDTH = 100
INDENT = 30


def render_help(registry: Registry) -> str:
    """All options by section, with their values and defaults."""
    lines = ["usage: rayllm serve MODEL [options]", ""]
    section = ""
    for option in registry:
        if option.section != section:
            section = option.section
            lines += [f"{section}:"]
        lines += _entry(option)
    return "\n".join(lines) + "\n"


def _entry(option: Option) -> Iterator[str]:
    head = "  " + ", ".join([_spelling(option), *option.aliases])
    text = option.help + _default(option)
    body = textwrap.wrap(text, WIDTH - INDENT)
    if len(head) < INDENT - 1:
        yield head.ljust(INDENT) + body[0]
        body = body[1:]
    else:
        yield head
    yield from (" " * INDENT + line for line in body)


def _spelling(option: Option) -> str:
    if option.kind is Kind.BOOL:
        return f"--[no-]{option.name}" if option.negatable else option.flag
    value = "{" + ",".join(option.choices) + "}" if option.choices else option.kind.name
    return f"{option.flag} {value}" + (" ..." if option.kind is Kind.LIST else "")


def _default(option: Option) -> str:
    if option.default is None or option.default in ({}, []):
        return ""
    shown = {True: "on", False: "off"}[option.default] if option.kind is Kind.BOOL else option.default
    return f" Default: {shown}."
