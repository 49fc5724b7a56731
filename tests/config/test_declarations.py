"""The declarations against the reference list of options, field by field."""

import json
from pathlib import Path

import pytest

from rayllm.config.help import describe, options_table
from rayllm.config.registry import registry

SPEC = json.loads((Path(__file__).parent / "flags.json").read_text())
FLAGS = {flag["flag"]: flag for flag in SPEC["flags"]}
LEGACY = {flag["flag"]: flag for flag in SPEC["legacy_flags"]}


def test_the_options_are_those_of_the_list_in_its_order() -> None:
    assert [option.flag for option in registry()] == list(FLAGS)
    assert [f"--{name}" for name in registry().legacy] == list(LEGACY)
    assert len(FLAGS) == 227


@pytest.mark.parametrize("flag", FLAGS)
def test_each_is_declared_as_the_list_has_it(flag: str) -> None:
    _compare(describe(registry()[flag.removeprefix("--")]), FLAGS[flag])


@pytest.mark.parametrize("flag", LEGACY)
def test_older_ones_too(flag: str) -> None:
    wanted = LEGACY[flag]
    declared = describe(registry().legacy[flag.removeprefix("--")].option) | {"section": wanted["group"]}
    _compare(declared, wanted)


def _compare(declared: dict[str, object], wanted: dict[str, object]) -> None:
    assert declared["section"] == wanted["group"]
    assert declared["type"] == wanted["type"]
    assert declared["default"] == wanted["default"]
    assert set(declared["aliases"]) == set(wanted["aliases"])
    assert declared["choices"] == wanted["choices"]


def test_every_option_is_described() -> None:
    for option in registry():
        assert option.help.endswith((".", "?")), option.flag
        assert option.name in options_table([option])


def test_the_table_in_the_repository_is_current() -> None:
    """`rayllm options > rayllm/config/options.md` writes it."""
    written = Path(__file__).parents[2] / "rayllm/config/options.md"
    assert written.read_text().endswith(options_table(registry()))
