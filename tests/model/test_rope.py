"""Angles of positions: looked up in a table, or computed where that would be too large."""

import pytest
import torch

from rayllm.model import rope
from rayllm.model.rope import Rope
from rayllm.model.spec import RopeSpec


def test_angles_looked_up_are_those_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RopeSpec(theta=10000.0, size=10, kind="linear", values={"factor": 2.0}, trained_positions=64)
    positions = torch.tensor([5, 0, 64, 5])
    table = Rope(spec, 64, torch.device("cpu"))
    assert table.table_PR is not None
    monkeypatch.setattr(rope, "TABLE_BYTES", 0)
    computing = Rope(spec, 64, torch.device("cpu"))
    assert computing.table_PR is None
    torch.testing.assert_close(table(positions), computing(positions), rtol=0, atol=1e-6)
    angles = positions[:, None] / (2.0 * 10000.0 ** (torch.arange(5) / 5))
    torch.testing.assert_close(table(positions), torch.cat((angles.cos(), angles.sin()), dim=1), rtol=0, atol=1e-5)
