"""Which layers a stage has."""

import pytest

from rayllm.parallel.ranks import Ranks


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(30, [30]), (3, [2, 1]), (30, [10, 10, 10]), (5, [2, 2, 1]), (30, [7, 8, 8, 7]), (5, [1, 2, 1, 1])],
)
def test_stages_divide_the_layers(count: int, sizes: list[int]) -> None:
    """What is over goes to those in the middle, which compute neither embeddings nor logits."""
    runs = [Ranks(stage=stage, stages=len(sizes)).layers(count) for stage in range(len(sizes))]
    assert [len(run) for run in runs] == sizes
    assert [layer for run in runs for layer in run] == list(range(count))


def test_ends_of_the_pipeline() -> None:
    assert Ranks().alone
    assert [(rank.first, rank.last) for rank in (Ranks(stage=s, stages=3) for s in range(3))] == [
        (True, False), (False, False), (False, True),
    ]  # fmt: skip
    assert not Ranks(stages=2).alone
