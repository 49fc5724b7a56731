"""Steps for a pipeline of several stages: several in flight, none of which waits for another's token."""

from concurrent.futures import Future

from rayllm.config.parallel import ParallelSettings
from rayllm.messages.worker import StepPlan, StepResult
from tests.engine.conftest import make_add
from tests.engine.test_engine import Make, expected, random_prompts

STAGES = 3


def test_requests_take_turns_in_the_stages_and_keep_their_tokens(bench: Make) -> None:
    one = bench(parallel=ParallelSettings(stages=STAGES), num_blocks=80, max_num_batched_tokens=24, max_num_seqs=12)
    submit, deepest = one.executor.submit, 0

    def checked(plan: StepPlan) -> "Future[StepResult]":
        nonlocal deepest
        flying = [step for step, _ in one.engine._sent]
        deepest = max(deepest, len(flying) + 1)
        waited_for = {request.key for step in flying for request in step.sampling if request.row in plan.rows}
        assert not waited_for, "a request's next token is planned before its last one is known"
        return submit(plan)

    one.executor.submit = checked  # type: ignore[method-assign]
    prompts = random_prompts(24)
    assert one.run(*(make_add(i, prompt, 20) for i, prompt in enumerate(prompts))) == [
        expected(prompt, 20) for prompt in prompts
    ]
    assert deepest == STAGES
