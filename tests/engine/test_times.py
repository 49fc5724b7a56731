"""The first and the last output of a request tell how its time in the engine was spent."""

import pytest

from .conftest import make_add


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_first_and_last_outputs_have_times(bench, async_scheduling):
    one = bench(async_scheduling=async_scheduling)
    one.executor.step_times = (0.25, 0.5)
    one.run(make_add(1, [1, 2, 3], 2))
    one.run(make_add(2, [4, 5, 6], 4))
    first, *between, last = one.outputs[0, 2]
    assert not any(output.times for output in between)
    assert (first.times.model, first.times.worker) == (0.25, 0.5)
    assert (last.times.model, last.times.worker) == (1.0, 2.0)
    assert first.times.decode == 0
    assert last.times.queued == first.times.queued >= 0
    assert last.times.prefill == first.times.prefill >= 0
    assert last.times.decode > 0


def test_prompts_in_chunks_take_their_steps(bench):
    one = bench(max_num_batched_tokens=4)
    one.executor.step_times = (0.25, 0.5)
    one.run(make_add(1, list(range(1, 11)), 1))
    [only] = one.outputs[0, 1]
    assert only.times.model == 0.75
