"""The command `rayllm`."""

import json
import logging
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace

from rayllm.config.engine import EngineConfig
from rayllm.config.environment import Environment, check_names
from rayllm.config.help import completion, describe, options_table, render_help
from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.serve import LogSettings
from rayllm.errors import ConfigError, RayLLMError
from rayllm.logs import configure_logging

log = logging.getLogger(__name__)

USAGE = """usage: rayllm serve MODEL [options]
       rayllm serve --help[=all|SECTION|OPTION|WORD]
       rayllm options [--json] [--legacy]
       rayllm completion bash|zsh|fish
       rayllm --version
"""


def main(arguments: Sequence[str] | None = None, variables: MutableMapping[str, str] | None = None) -> int:
    """Run the command; the exit status. The only place where the environment is read."""
    arguments = sys.argv[1:] if arguments is None else arguments
    variables = os.environ if variables is None else variables
    match list(arguments):
        case ["--version"]:
            from rayllm import __version__

            print(__version__)
            return 0
        case ["serve", *rest]:
            return _serve(rest, variables)
        case ["options", *rest] if set(rest) <= {"--json", "--legacy"}:
            options = [old.option for old in registry().legacy.values()] if "--legacy" in rest else list(registry())
            as_json = json.dumps([describe(option) for option in options], indent=1)
            print(as_json if "--json" in rest else options_table(options), end="\n" if "--json" in rest else "")
            return 0
        case ["completion", shell]:
            return _told(lambda: completion(registry(), shell))
        case ["-h" | "--help" | "help"]:
            print(USAGE, end="")
            return 0
        case _:
            print(USAGE, end="", file=sys.stderr)
            return 2


def _serve(arguments: Sequence[str], variables: MutableMapping[str, str]) -> int:
    for argument in arguments:
        name, _, topic = argument.partition("=")
        if name in ("--help", "-h"):
            return _told(lambda topic=topic: render_help(registry(), topic))
    try:
        environment = Environment.read(variables)
        configure_logging(LogSettings(level=environment.logging_level))
        values = parse_arguments(arguments, registry())
        unknown = check_names(variables, values["fail-on-environ-validation"])
        resolved = load(values, environment.api_key, environment.server_dev_mode)
        configure_logging(LogSettings(level=environment.logging_level, config=resolved.serve.log_config))
        for note in (*unknown, *resolved.notes):
            log.warning(note)
        for line in resolved.plan:
            log.info(line)
        if resolved.engine.parallel.node_rank:
            return _serve_node(resolved.engine, environment)
        from rayllm.serving.launch import serve_model

        return serve_model(resolved, environment, variables)
    except ConfigError as error:
        print(f"rayllm: {error}", file=sys.stderr)
        return 1
    except RayLLMError as error:
        print(f"rayllm: {error}", file=sys.stderr)
        return 1


def _serve_node(engine: EngineConfig, environment: Environment) -> int:
    """Run the workers of a node other than the first, without Ray or HTTP."""
    from rayllm.executor.mp import serve_node

    parallel = replace(engine.parallel, secret=environment.cluster_secret)
    return serve_node(replace(engine, parallel=parallel))


def _told(text: Callable[[], str]) -> int:
    """Print a text; the exit status."""
    try:
        print(text(), end="")
    except ConfigError as error:
        print(f"rayllm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
