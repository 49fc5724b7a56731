"""The command `rayllm`."""

import os
import sys
from collections.abc import MutableMapping, Sequence

from rayllm.config.environment import Environment
from rayllm.config.help import render_help
from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.errors import ConfigError, RayLLMError
from rayllm.serving.logs import configure_logging

USAGE = """usage: rayllm serve MODEL [options]
       rayllm serve --help
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
        case ["-h" | "--help" | "help"]:
            print(USAGE, end="")
            return 0
        case _:
            print(USAGE, end="", file=sys.stderr)
            return 2


def _serve(arguments: Sequence[str], variables: MutableMapping[str, str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(render_help(registry()), end="")
        return 0
    try:
        environment = Environment.read(variables)
        configure_logging(environment.logging_level)
        values = parse_arguments(arguments, registry())
        resolved = load(values, environment.api_key)
        from rayllm.serving.launch import serve_model

        return serve_model(resolved, environment, variables)
    except ConfigError as error:
        print(f"rayllm: {error}", file=sys.stderr)
        return 1
    except RayLLMError as error:
        print(f"rayllm: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
