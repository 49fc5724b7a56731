import pytest

from rayllm.kv.layout import KVLayout, group_layers


def test_layers_are_grouped_by_window_with_few_left_empty() -> None:
    gemma2 = group_layers([8, None] * 13, 100)
    assert gemma2.groups == (tuple(range(1, 26, 2)), tuple(range(0, 26, 2)))
    assert (gemma2.sliding, gemma2.window) == (1, 8)
    gemma3 = group_layers([None if i % 6 == 5 else 8 for i in range(26)], 100)
    assert gemma3.groups[0] == (5, 11, 17, 23)
    assert (gemma3.width, gemma3.sliding, len(gemma3.largest(26))) == (7, 6, 4)
    assert group_layers([8] * 14 + [None] * 13, 100).width == 2, "one layer more does not make a group of its own"
    assert sorted(layer for group in gemma3.groups for layer in group) == list(range(26))


@pytest.mark.parametrize("windows", [[None] * 4, [100, None], [8, 9, None]], ids=["full", "wide", "of_two_sizes"])
def test_layers_are_one_group_where_windows_save_nothing(windows: list[int | None]) -> None:
    layout = group_layers(windows, 100)
    assert layout == KVLayout()
    assert layout.places(4) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert layout.most_blocks(33, 8, 16) == 3
    assert layout.longest(3, 8, 16, 1000) == 48
    assert layout.usable_tokens(3, 40, 8, 16) == 48


def test_layers_of_one_window_are_one_group_that_slides() -> None:
    layout = group_layers([8, 8], 100)
    assert (layout.groups, layout.sliding) == (((0, 1),), 1)
    assert layout.most_blocks(10_000, 4, 4) == 4, "4 tokens of a step and 7 before them"
    assert layout.longest(4, 4, 4, 10_000) == 10_000
    assert layout.longest(3, 4, 4, 10_000) == 12


def test_places_name_group_and_cache() -> None:
    layout = group_layers([8, None, 8, 8], 100)
    assert layout.groups == ((1,), (0,), (2,), (3,))
    assert layout.places(4) == [(1, 0), (0, 0), (2, 0), (3, 0)]


def test_a_run_of_layers_keeps_its_groups() -> None:
    """Though they may have no layer in it: tables of blocks are those of all layers."""
    gemma3 = group_layers([None if i % 6 == 5 else 8 for i in range(26)], 100)
    runs = [gemma3.of_layers(range(13)), gemma3.of_layers(range(13, 26))]
    for run, first in zip(runs, (0, 13), strict=True):
        assert (run.width, run.sliding, run.window) == (gemma3.width, gemma3.sliding, gemma3.window)
        for layer, (group, place) in enumerate(run.places(13)):
            assert first + layer in gemma3.groups[group]
            assert place < len(run.largest(13))
    assert KVLayout().of_layers(range(2, 4)).places(2) == [(0, 0), (0, 1)]
    assert group_layers([8, None, 8, 8], 100).of_layers(range(2, 4)).groups == ((), (), (0,), (1,))


@pytest.mark.parametrize("step", [1, 5, 64])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_no_request_holds_more_than_the_most(window: int, step: int) -> None:
    layout, size, length = group_layers([window, None, window], 200), 4, 200
    for start in range(length):
        end = min(start + step, length)
        seen = -(-end // size) - layout.first_seen(start, size)
        assert -(-end // size) + 2 * seen <= layout.most_blocks(end, step, size)
    need = layout.most_blocks(length, step, size)
    assert layout.longest(need, step, size, length) == length
    assert layout.longest(need - 1, step, size, length) < length
    assert layout.usable_tokens(3 * need, length, step, size) == 3 * length
