"""Requests whose grammar is compiled before they are admitted."""

from collections.abc import Callable

import pytest

from rayllm.errors import EngineDead, Overloaded, RequestError
from rayllm.messages.engine import Add
from rayllm.messages.structured import StructuredOutputs
from tests.engine.conftest import Bench, make_add

Make = Callable[..., Bench]


def held(request_id: int, **changes: object) -> Add:
    return make_add(request_id, [1, 2], 4, structured_outputs=StructuredOutputs(regex="a*"), **changes)


def test_it_is_admitted_when_its_grammar_is_there(bench: Make) -> None:
    bench_ = bench()
    answer = bench_.engine.add(0, held(0))
    assert answer is not None
    assert bench_.run(make_add(1, [3], 4)), "others do not wait for it"
    assert not answer.done()
    assert (0, 0) not in bench_.outputs
    bench_.executor.grammars[0].set_result("compiled")
    assert answer.result(5) is None
    bench_.wait(lambda: bench_.finished((0, 0)))
    assert len(bench_.tokens((0, 0))) == 4


def test_a_wrong_grammar_is_refused(bench: Make) -> None:
    bench_ = bench()
    answer = bench_.engine.add(0, held(0))
    bench_.executor.grammars[0].set_exception(RequestError("wrong", "structured_outputs"))
    with pytest.raises(RequestError, match="wrong"):
        answer.result(5)
    answer = bench_.engine.add(0, held(0))
    bench_.executor.grammars[1].set_result(None)
    assert answer.result(5) is None
    bench_.wait(lambda: bench_.finished((0, 0)))


@pytest.mark.parametrize("whole_client", [False, True])
def test_an_abort_while_it_is_compiled(bench: Make, whole_client: bool) -> None:
    bench_ = bench()
    answer = bench_.engine.add(0, held(0))
    if whole_client:
        bench_.engine.abort_client(0)
    else:
        bench_.engine.abort(0, 0)
    with pytest.raises(RequestError, match="aborted"):
        answer.result(5)
    again = bench_.engine.add(0, held(0))
    bench_.executor.grammars[0].set_result(None)
    assert not again.done(), "the compilation of the first one says nothing of the second"
    bench_.engine.abort(0, 0)
    bench_.run(make_add(1, [3], 4))
    assert (0, 0) not in bench_.outputs


def test_it_counts_as_open(bench: Make) -> None:
    bench_ = bench(max_num_seqs=1, max_waiting=1)
    for i in range(2):
        bench_.engine.add(0, held(i))
    with pytest.raises(RequestError, match="in use"):
        bench_.engine.add(0, held(1))
    with pytest.raises(Overloaded):
        bench_.engine.add(0, make_add(2, [1], 1))
    bench_.engine.abort_client(0)


@pytest.mark.parametrize("how", ["shutdown", "fault"])
def test_it_is_answered_when_the_engine_ends(bench: Make, how: str) -> None:
    bench_ = bench()
    answer = bench_.engine.add(0, held(0))
    if how == "fault":
        bench_.executor.fail_at = 0
        bench_.engine.add(0, make_add(1, [3], 4))
    else:
        bench_.engine.shutdown()
    with pytest.raises(EngineDead):
        answer.result(5)
