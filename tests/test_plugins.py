"""Classes of the user's own are looked for before anything slow is started."""

import sys
from types import SimpleNamespace

import pytest

from rayllm.errors import ConfigError
from rayllm.plugins import check_plugins


def config(**named):
    nothing = {"logits_processors": (), "scheduler_cls": None, "worker_cls": None, "worker_extension_cls": None}
    return SimpleNamespace(**nothing | named)


def test_what_is_there_is_found_and_not_imported(tmp_path, monkeypatch):
    folder = tmp_path / "never_imported" / "deeper"
    folder.mkdir(parents=True)
    (tmp_path / "never_imported" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "mine.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_plugins(config())
    check_plugins(config(logits_processors=("never_imported.deeper.mine:Thing", "json:loads"), worker_cls="json:loads"))
    assert "never_imported" not in sys.modules
    with pytest.raises(ConfigError, match=r"--logits-processors: .*'never_imported.deeper.yours'.*PYTHONPATH"):
        check_plugins(config(logits_processors=("json:loads", "never_imported.deeper.yours:Thing")))


@pytest.mark.parametrize("name", ["", ".", "a..b", "no-such", "no.such", "json.decoder.deeper", "json."])
def test_what_is_not_is_refused(name):
    with pytest.raises(ConfigError, match="--scheduler-cls"):
        check_plugins(config(scheduler_cls=f"{name}:Thing"))
