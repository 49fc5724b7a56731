"""`--help`, the table of options and shell completion, all derived from the declarations."""

import difflib
import json
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from rayllm.config.option import Kind, Option, State, spellings
from rayllm.config.registry import Registry
from rayllm.errors import ConfigError

WIDTH = 100
INDENT = 30
COMMON = (
    "host", "port", "api-key", "served-model-name", "dtype", "max-model-len", "data-parallel-size",
    "tensor-parallel-size", "max-num-seqs", "max-num-batched-tokens", "kv-cache-memory-bytes", "chat-template",
    "config",
)  # fmt: skip
"""Options that the short help shows."""
USAGE = "usage: rayllm serve MODEL [options]"
MORE = """More: --help=all, --help=SECTION, --help=OPTION, or any word to search for; `rayllm options` lists them.
Sections: {sections}."""
STATES = {State.CUDA: " [CUDA only]", State.PLANNED: " [not supported yet]"}


def render_help(registry: Registry, topic: str = "") -> str:
    """The most used options; those of a section; one option; those that a word is found in; or `all`.

    Raises:
        ConfigError: nothing is known by that topic.
    """
    if topic == "all":
        return _sections(registry)
    if topic:
        return "\n".join(_about(registry, topic)) + "\n"
    sections = ", ".join(dict.fromkeys(option.section for option in registry))
    lines = [USAGE, "", *(line for name in COMMON for line in _entry(registry[name])), ""]
    more = MORE.format(sections=sections).splitlines()
    return "\n".join([*lines, *(line for text in more for line in textwrap.wrap(text, WIDTH))]) + "\n"


def _sections(options: Iterable[Option]) -> str:
    lines = [USAGE, ""]
    section = ""
    for option in options:
        if option.section != section:
            section = option.section
            lines += [f"{section}:"]
        lines += _entry(option)
    return "\n".join(lines) + "\n"


def _about(registry: Registry, topic: str) -> Iterator[str]:
    name = topic.lstrip("-").replace("_", "-")
    one = registry.alias(topic) or next((option for option in registry if option.name == name), None)
    if one is not None:
        yield from _entry(one)
        yield from (" " * INDENT + line for line in _details(one))
        return
    found = [option for option in registry if option.section == topic.replace("-", "_")] or [
        option for option in registry if topic.lower() in option.name or topic.lower() in option.help.lower()
    ]
    if not found:
        near = difflib.get_close_matches(name, [option.name for option in registry], n=1)
        raise ConfigError(f"--help={topic}", "finds nothing", f"did you mean --help={near[0]}?" if near else "")
    for option in found:
        yield from _entry(option)


def _entry(option: Option) -> Iterator[str]:
    head = "  " + ", ".join([_spelling(option), *option.aliases])
    body = textwrap.wrap(option.help + _default(option) + STATES.get(option.state, ""), WIDTH - INDENT)
    if len(head) < INDENT - 1:
        yield head.ljust(INDENT) + body[0]
        body = body[1:]
    else:
        yield from textwrap.wrap(head, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    yield from (" " * INDENT + line for line in body)


def _details(option: Option) -> Iterator[str]:
    """What a user of this option may also want to know."""
    yield f"Section {option.section}; in a file: {option.name}: {_sample(option)}"
    if option.unit:
        yield f"In {option.unit}."
    if option.minimum is not None:
        yield f"At least {option.minimum:g}."
    if option.maximum is not None:
        yield f"At most {option.maximum:g}."
    if option.keyed:
        yield from textwrap.wrap(f"Keys: {', '.join(option.default)}.", WIDTH - INDENT)
    if option.cure:
        yield f"Instead: {option.cure}."


def _sample(option: Option) -> str:
    if option.kind is Kind.BOOL:
        return "true"
    return "[...]" if option.kind is Kind.LIST else "{...}" if option.kind is Kind.JSON else "..."


def _spelling(option: Option) -> str:
    if option.kind is Kind.BOOL:
        return f"--[no-]{option.name}" if option.negatable else option.flag
    value = "{" + ",".join(map(str, option.choices)) + "}" if option.choices else option.kind.name
    return f"{option.flag} {value}" + (" ..." if option.kind is Kind.LIST else "")


def _default(option: Option) -> str:
    if option.default in (None, "") or option.default in ({}, []) or option.keyed:
        return ""
    if option.kind is Kind.BOOL:
        return f" Default: {'on' if option.default else 'off'}."
    shown = option.default if isinstance(option.default, str) else json.dumps(option.default)
    return f" Default: {shown}."


def describe(option: Option) -> dict[str, Any]:
    """An option for machines."""
    return {
        "name": option.flag, "aliases": spellings(option)[1:], "section": option.section,
        "type": option.kind.value, "default": option.default, "choices": list(option.choices) or None,
        "unit": option.unit or None, "state": option.state.value, "help": option.help,
    }  # fmt: skip


def options_table(options: Iterable[Option]) -> str:
    """All options as a table in Markdown, which a terminal shows as well."""
    rows = ["| option | type | default | state | meaning |", "| --- | --- | --- | --- | --- |"]
    for option in options:
        names = ", ".join(f"`{name}`" for name in [option.flag, *option.aliases])
        default = "" if option.default is None else "..." if option.keyed else f"`{json.dumps(option.default)}`"
        meaning = option.help.replace("|", "\\|") + (f" In {option.unit}." if option.unit else "")
        rows.append(f"| {names} | {option.kind.value} | {default} | {option.state.value} | {meaning} |")
    return "\n".join(rows) + "\n"


def completion(registry: Registry, shell: str) -> str:
    """A script that has a shell complete the names of options, and their choices.

    Raises:
        ConfigError: the shell is not known.
    """
    words = sorted(word for option in registry for word in spellings(option))
    if shell == "fish":
        names = "\n".join(
            f"complete -c rayllm -l {option.name} -d {json.dumps(option.help)}"
            + (f" -xa {json.dumps(' '.join(map(str, option.choices)))}" if option.choices else "")
            for option in registry
        )
        return f"complete -c rayllm -n __fish_use_subcommand -xa 'serve options completion'\n{names}\n"
    if shell not in ("bash", "zsh"):
        raise ConfigError(f"completion {shell}", "is no known shell", "one of bash, zsh, fish")
    cases = "\n".join(
        f'    {option.flag}) COMPREPLY=($(compgen -W {json.dumps(" ".join(map(str, option.choices)))} -- "$word"));;'
        for option in registry
        if option.choices
    )
    script = f"""_rayllm() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  COMPREPLY=()
  if [ "$COMP_CWORD" = 1 ]; then COMPREPLY=($(compgen -W "serve options completion" -- "$word")); return; fi
  case "$before" in
{cases}
    *) case "$word" in
      -*) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word"));;
      *) COMPREPLY=($(compgen -f -- "$word"));;
    esac;;
  esac
}}
complete -F _rayllm rayllm
"""
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + script
