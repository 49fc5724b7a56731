import numpy as np
import pytest

from rayllm.worker.cascade import LEAST_SAVED, find_shared_prefix


def table(rows: int, shared: int, blocks: int = 80, first: int = 0) -> np.ndarray:
    """(1, rows, blocks) of which the first `shared` are the same in all rows."""
    own = first + np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    own[:, :shared] = own[0, :shared]
    return own[None]


def find(table_GBK: np.ndarray, lengths: list[int], counts: list[int] | None = None, block: int = 16):
    ones = counts or [1] * len(lengths)
    return find_shared_prefix(table_GBK, np.array(ones, np.int32), np.array(lengths, np.int32), block)


def test_what_requests_have_in_common() -> None:
    found = find(table(8, 40), [700] * 8)
    assert found.requests.tolist() == list(range(8))
    assert found.tokens == 512, "whole splits of 640 tokens"
    assert find(table(8, 80), [700] * 7 + [513]).tokens == 512, "fewer than any request has"
    assert find(table(9, 80), [700] * 8 + [512]).tokens == 256


def test_only_the_most_alike_of_one_query() -> None:
    both = np.concatenate([table(3, 60, first=10_000), table(9, 40)], axis=1)
    assert find(both, [700] * 12).requests.tolist() == list(range(3, 12))
    counts = [1] * 12
    counts[5] = 7
    assert find(both, [700] * 12, counts).requests.tolist() == [3, 4, *range(6, 12)]
    assert find(both, [700] * 11 + [200]).requests.tolist() == list(range(3, 11)), "one is too short"


def test_groups_of_layers_must_agree() -> None:
    assert find(np.concatenate([table(12, 60), table(12, 20)]), [900] * 12).tokens == 256


@pytest.mark.parametrize("rows", range(2, 12))
def test_little_is_not_worthwhile(rows: int) -> None:
    assert (find(table(rows, 32), [700] * rows) is not None) == (512 * (rows - 1) >= LEAST_SAVED)


@pytest.mark.parametrize("block", [4, 48, 512])
def test_blocks_of_any_size(block: int) -> None:
    found = find(table(12, 10, blocks=200), [6000] * 12, block=block)
    assert (0 if found is None else found.tokens) == 10 * block // 256 * 256


def test_nothing_is_shared() -> None:
    assert find(table(1, 40), [700]) is None
    assert find(table(12, 0), [700] * 12) is None
    assert find(table(12, 40), [200] * 12) is None
