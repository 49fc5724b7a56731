"""What workers ask of Ray, and which of a group's bundles each of them gets."""

import pytest

from rayllm.config.parallel import ParallelSettings
from rayllm.executor.ray import bundle_of, order_by_node


def test_a_worker_asks_for_a_gpu_or_else_a_cpu_or_its_share() -> None:
    settings = ParallelSettings(tensor=2)
    assert bundle_of(settings, {"CPU": 64.0, "GPU": 8.0}, 1) == {"GPU": 1.0}
    assert bundle_of(settings, {"CPU": 64.0}, 1) == {"CPU": 1.0}
    assert bundle_of(ParallelSettings(tensor=3), {"CPU": 2.0}, 1) == {"CPU": 0.66}
    assert bundle_of(ParallelSettings(tensor=2, stages=2), {"CPU": 2.0}, 2) == {"CPU": 0.25}
    assert bundle_of(settings, {}, 1) == {"CPU": 0.01}


def test_resources_that_are_set_are_asked_for_too() -> None:
    special = ParallelSettings(tensor=2, resources=(("special", 1.0),))
    assert bundle_of(special, {"GPU": 2.0}, 1) == {"GPU": 1.0, "special": 1.0}
    own = ParallelSettings(tensor=2, resources=(("CPU", 4.0),))
    assert bundle_of(own, {"GPU": 2.0}, 1) == {"CPU": 4.0}


@pytest.mark.parametrize(
    ("nodes", "tensor", "stages"),
    [
        ("aaaa", 2, ["aa", "aa"]),
        ("abab", 2, ["aa", "bb"]),
        ("aabbb", 5, ["bbbaa"]),
        ("abbabb", 3, ["bbb", "aab"]),
        ("aaabcb", 2, ["aa", "bb", "ac"]),
    ],
)
def test_the_ranks_of_a_stage_are_on_one_node_where_that_can_be(nodes: str, tensor: int, stages: list[str]) -> None:
    order = order_by_node(list(nodes), tensor)
    assert sorted(order) == list(range(len(nodes)))
    names = [nodes[i] for i in order]
    assert ["".join(names[i : i + tensor]) for i in range(0, len(names), tensor)] == stages
