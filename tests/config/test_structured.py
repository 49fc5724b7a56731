"""The options of structured outputs, as settings and as what engines then do."""

import pytest

from rayllm.config import structured
from rayllm.config.engine import StructuredSettings
from rayllm.errors import ConfigError
from tests.engine.options import config_of

FLAG = "--structured-outputs-config"


@pytest.mark.option("structured-outputs-config")
def test_settings() -> None:
    """What they do to outputs is seen in tests/structured."""
    assert config_of().structured == StructuredSettings()
    arguments = (f"{FLAG}.backend", "guidance", f"{FLAG}.disable_any_whitespace", "true")
    more = (f"{FLAG}.disable_additional_properties", "true", f"{FLAG}.enable_in_reasoning", "true")
    assert config_of(*arguments, *more).structured == StructuredSettings("guidance", True, True, True)
    assert config_of().tokenizer == "/m"
    assert config_of("--skip-tokenizer-init").tokenizer is None


@pytest.mark.option(
    "guided-decoding-backend", "guided-decoding-disable-any-whitespace", "guided-decoding-disable-additional-properties"
)
def test_older_spellings() -> None:
    older = ("--guided-decoding-backend", "guidance", "--guided-decoding-disable-any-whitespace")
    settings = config_of(*older, "--guided-decoding-disable-additional-properties").structured
    assert settings == StructuredSettings("guidance", True, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("backend", "lm-format-enforcer"), "unknown"),
        (("backend", "outlines", "disable_any_whitespace", "true"), "cannot"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: tuple[str, ...], says: str) -> None:
    flags = [f"{FLAG}.{part}" if i % 2 == 0 else part for i, part in enumerate(arguments)]
    with pytest.raises(ConfigError, match=says):
        config_of(*flags)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(structured.PACKAGES, "outlines", "no_such_package")
    with pytest.raises(ConfigError, match="the package no-such-package is not installed; pip install"):
        config_of(f"{FLAG}.backend", "outlines")
