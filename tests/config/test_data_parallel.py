"""Which ranks a server runs and who spreads requests over them, as the options --data-parallel-* say together."""

import pytest

from rayllm.config.data_parallel import DataParallel
from rayllm.errors import ConfigError

from .test_resolve import resolved


def group(*arguments):
    return resolved(*arguments).serve.data_parallel


def test_by_default_one_server_has_all_ranks():
    assert group() == DataParallel()
    assert group("-dp", "3") == DataParallel(size=3, engines=3)
    assert group("-dp", "3").alone
    assert group("-dp", "3", "-dpl", "3") == group("-dp", "3")


@pytest.mark.option("data-parallel-rank", "data-parallel-external-lb")
def test_a_rank_makes_a_server_of_one_engine():
    one = resolved("-dp", "4", "-dpn", "2")
    assert one.serve.data_parallel == DataParallel(size=4, first=2, engines=1, balancing="external")
    assert one == resolved("-dp", "4", "-dpn", "2", "--data-parallel-external-lb")
    assert (one.engine.data_parallel_rank, one.engine.data_parallel_size) == (2, 4)
    assert (one.engine.engines_on_host, one.serve.http.servers) == (1, 1)
    assert one == resolved("-dp", "4", "-dpn", "2", "-dpr", "2", "-dpl", "1")
    # Servers of a group draw different seeds for requests that bring none.
    seeds = {resolved("-dp", "2", "-dpn", str(rank)).serve.frontend.seed for rank in range(2)}
    assert len(seeds) == 2


@pytest.mark.option("data-parallel-hybrid-lb", "data-parallel-start-rank", "data-parallel-size-local")
def test_some_ranks_of_a_group():
    two = resolved("-dp", "4", "-dpl", "2", "-dpr", "2", "-dph")
    assert two.serve.data_parallel == DataParallel(size=4, first=2, engines=2, balancing="hybrid")
    assert list(two.serve.data_parallel.ranks) == [2, 3]
    assert two == resolved("-dp", "4", "-dpl", "2", "-dpr", "2")
    assert (two.engine.engines_on_host, two.serve.http.servers) == (2, 2)
    assert group("-dp", "4", "-dpl", "2", "-dph").first == 0
    whole = resolved("-dp", "2", "-dpl", "2", "-dph")
    assert whole.serve.data_parallel == DataParallel(size=2, engines=2)
    assert any("--data-parallel-hybrid-lb has no effect" in note for note in whole.notes)


@pytest.mark.option("data-parallel-backend", "data-parallel-size-local")
def test_the_cluster_may_place_engines():
    assert group("-dp", "4", "-dpb", "ray") == DataParallel(size=4, engines=4, one_node=False)
    few = resolved("-dp", "4", "-dpb", "ray", "-dpl", "2")
    assert few.serve.data_parallel == DataParallel(size=4, engines=4, one_node=False, per_node=2)
    assert (few.engine.engines_on_host, few.engine.threads) == (2, 2)
    (note,) = resolved("-dpb", "ray").notes
    assert "--data-parallel-backend ray has no effect" in note


@pytest.mark.option("data-parallel-address", "data-parallel-rpc-port")
def test_where_a_group_meets():
    rank = ["-dp", "2", "-dpn", "1"]
    assert group(*rank).meeting is None
    assert group(*rank, "-dpa", "head").meeting == ("head", 29550)
    assert group(*rank, "-dpp", "7000").meeting == ("127.0.0.1", 7000)
    assert group("-dp", "4", "-dpl", "2", "-dph", "-dpa", "::1", "-dpp", "7").meeting == ("::1", 7)
    alone = resolved("-dp", "2", "-dpa", "head", "-dpp", "7000")
    assert alone.serve.data_parallel.meeting is None
    assert [note.split()[0] for note in alone.notes] == ["--data-parallel-address", "--data-parallel-rpc-port"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("-dp 2 -dpn 2", "rank"),
        ("-dpn 1", "rank"),
        ("-dp 2 --data-parallel-external-lb", "external-lb"),
        ("-dp 2 -dpn 0 --data-parallel-hybrid-lb -dpl 1", "hybrid-lb"),
        ("-dp 2 -dpe -dph", "hybrid-lb"),
        ("-dp 4 -dpn 1 -dpl 2", "size-local"),
        ("-dp 4 -dpn 1 -dpr 2", "start-rank"),
        ("-dp 2 -dpl 3", "size-local"),
        ("-dp 2 -dpl 0", "size-local"),
        ("-dp 2 -dpl 1", "size-local"),
        ("-dp 4 -dph", "hybrid-lb"),
        ("-dp 4 -dpr 2", "start-rank"),
        ("-dp 4 -dpr 3 -dpl 2", "start-rank"),
        ("-dp 4 -dpr 4 -dpl 1", "start-rank"),
        ("-dp 4 -dpr 2 -dpl 2 -dpb ray", "backend"),
    ],
)
def test_contradictions(arguments, option):
    with pytest.raises(ConfigError) as caught:
        resolved(*arguments.split())
    assert caught.value.option == f"--data-parallel-{option}"
    assert caught.value.cure


def test_what_a_rank_implies_cannot_be_denied():
    with pytest.raises(ConfigError, match="--no-data-parallel-external-lb: contradicts --data-parallel-rank"):
        resolved("-dp", "2", "-dpn", "1", "--no-data-parallel-external-lb")
    with pytest.raises(ConfigError, match="--no-data-parallel-hybrid-lb"):
        resolved("-dp", "4", "-dpr", "2", "-dpl", "2", "--no-data-parallel-hybrid-lb")
