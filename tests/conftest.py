import logging

import pytest


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What rayllm logs from INFO on, wherever an entry point that ran before in this process sends it."""
    monkeypatch.setattr(logging.getLogger("rayllm"), "propagate", True)
    caplog.set_level(logging.INFO, "rayllm")
    return caplog
