"""Every effective option has a test that observes its effect: one marked `@pytest.mark.option("its-name")`."""

import ast
from collections.abc import Iterator
from pathlib import Path

from rayllm.config.option import State
from rayllm.config.registry import registry

TESTS = Path(__file__).parents[1]


def marked() -> Iterator[str]:
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.option":
                yield from (ast.literal_eval(argument) for argument in node.args)


def test_every_effective_option_is_tested() -> None:
    names = set(marked())
    effective = {option.name for option in registry() if option.state is State.EFFECTIVE}
    assert effective - names == set()
    assert names <= {option.name for option in registry()} | set(registry().legacy)
