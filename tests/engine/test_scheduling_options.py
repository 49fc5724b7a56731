"""Options of the scheduler, seen in the steps that it plans. Every engine answers the same whatever they say."""

import random

import pytest

from rayllm.engine.request import Request
from rayllm.engine.scheduler import Scheduler
from rayllm.errors import ConfigError, ContextTooLong
from tests.engine.conftest import make_add
from tests.engine.options import Stepper, config_of, resolved
from tests.engine.test_engine import expected, random_prompts


def prompt(length: int, first: int = 1) -> list[int]:
    return [first + i % 900 for i in range(length)]


@pytest.mark.option("max-num-batched-tokens", "enable-chunked-prefill")
def test_a_long_prompt_is_cut_to_the_budget() -> None:
    steps = Stepper("--max-num-batched-tokens", "64").run([make_add(0, prompt(200), 1)])
    assert steps == [{0: 64}, {0: 64}, {0: 64}, {0: 8}]


@pytest.mark.option("enable-chunked-prefill")
def test_without_chunks_a_prompt_is_computed_whole() -> None:
    whole = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "250", "--max-model-len", "250")
    one = Stepper(*whole)
    steps = one.run([make_add(0, prompt(200), 3), make_add(1, prompt(100, 2), 3), make_add(2, prompt(249, 3), 1)])
    assert steps[:2] == [{0: 200}, {0: 1, 1: 100}]
    assert {1: 1, 2: 249} in steps, "the longest prompt waits for a step with room for it"
    with pytest.raises(ContextTooLong):
        one.add(make_add(3, prompt(260), 1))
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens.*--max-model-len to 64"):
        config_of("--no-enable-chunked-prefill", "--max-num-batched-tokens", "64")
    assert config_of("--no-enable-chunked-prefill", "--max-model-len", "500").max_num_batched_tokens == 512
    with pytest.raises(ConfigError, match="--max-num-partial-prefills"):
        config_of("--no-enable-chunked-prefill", "--max-num-partial-prefills", "2")


@pytest.mark.option("max-num-partial-prefills", "max-long-partial-prefills")
def test_prompts_in_pieces_advance_together() -> None:
    adds = [make_add(0, prompt(100), 1), make_add(1, prompt(100, 2), 1)]
    one = Stepper("--max-num-batched-tokens", "40").run(adds)
    assert one == [{0: 40}, {0: 40}, {0: 20, 1: 20}, {1: 40}, {1: 40}]
    two = ("--max-num-partial-prefills", "2", "--max-long-partial-prefills", "2", "--max-num-batched-tokens", "40")
    assert Stepper(*two).run(adds) == [{0: 20, 1: 20}] * 5
    assert Stepper(*two).run(adds[:1]) == [{0: 40}, {0: 40}, {0: 20}], "alone it gets all of a step"


@pytest.mark.option("max-long-partial-prefills", "long-prefill-token-threshold")
def test_a_short_prompt_overtakes_a_long_one_that_must_wait() -> None:
    adds = [make_add(0, prompt(100), 1), make_add(1, prompt(100, 2), 1), make_add(2, prompt(20, 3), 1)]
    flags = ("--max-num-partial-prefills", "3", "--max-num-batched-tokens", "30")
    steps = Stepper(*flags, "--long-prefill-token-threshold", "32").run(adds)
    assert last(steps, 2) < first(steps, 1)
    assert last(steps, 0) <= first(steps, 1)
    assert all(sum(step.values()) == 30 for step in steps[:-1]), "no step is left half empty"
    none_long = Stepper(*flags, "--long-prefill-token-threshold", "200").run(adds)
    assert none_long[0] == {0: 10, 1: 10, 2: 10}
    short_too = Stepper(*flags, "--long-prefill-token-threshold", "10").run(adds)
    assert first(short_too, 2) > last(short_too, 0)


def first(steps: list[dict[int, int]], request: int) -> int:
    return next(i for i, step in enumerate(steps) if request in step)


def last(steps: list[dict[int, int]], request: int) -> int:
    return max(i for i, step in enumerate(steps) if request in step)


@pytest.mark.option("max-long-partial-prefills", "long-prefill-token-threshold")
def test_limits_of_prompts_in_pieces_must_fit_together() -> None:
    with pytest.raises(ConfigError, match="--max-long-partial-prefills: 2 is more than --max-num-partial-prefills, 1"):
        config_of("--max-long-partial-prefills", "2")
    with pytest.raises(ConfigError, match="--long-prefill-token-threshold: 600 is more"):
        config_of("--max-num-partial-prefills", "2", "--long-prefill-token-threshold", "600")
    assert config_of("--max-num-partial-prefills", "2").long_prefill_tokens == 20
    (note,) = resolved("--long-prefill-token-threshold", "60").notes
    assert note.startswith("--long-prefill-token-threshold has no effect")


@pytest.mark.option("scheduler-reserve-full-isl")
def test_a_prompt_starts_when_all_of_it_fits_or_its_first_piece() -> None:
    adds = [make_add(0, prompt(192), 40), make_add(1, prompt(192, 5), 40)]
    wanted = [expected(add.prompt_token_ids, 40) for add in adds]
    for flag, preempted in (("--scheduler-reserve-full-isl", False), ("--no-scheduler-reserve-full-isl", True)):
        stepper = Stepper(flag, "--max-num-batched-tokens", "64", blocks=20)
        stepper.run(adds)
        assert (stepper.scheduler.counters.preemptions > 0) == preempted
        assert [stepper.tokens[0], stepper.tokens[1]] == wanted


@pytest.mark.option("scheduling-policy")
@pytest.mark.parametrize(("policy", "order"), [("priority", [0, 2, 3, 1]), ("fcfs", [0, 1, 2, 3])])
def test_the_policy_orders_those_that_wait(policy: str, order: list[int]) -> None:
    stepper = Stepper("--scheduling-policy", policy, "--max-num-seqs", "1")
    stepper.add(make_add(0, [1], 5, priority=9))
    stepper.step()
    steps = stepper.run(make_add(i, [1, i], 1, priority=p) for i, p in ((1, 5), (2, -1), (3, 0)))
    assert list(dict.fromkeys(i for step in steps for i in step)) == order


class Shortest(Scheduler):
    """Short prompts first."""

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.num_prompt,)


@pytest.mark.option("scheduler-cls")
def test_a_scheduler_of_the_users_own(logged: pytest.LogCaptureFixture) -> None:
    path = f"{__name__}.Shortest"
    stepper = Stepper("--scheduler-cls", path, "--max-num-seqs", "1")
    adds = [make_add(i, prompt(length, i + 1), 2) for i, length in enumerate((30, 10, 20))]
    steps = stepper.run(adds)
    assert list(dict.fromkeys(i for step in steps for i in step)) == [1, 2, 0]
    assert [stepper.tokens[i] for i in range(3)] == [expected(add.prompt_token_ids, 2) for add in adds]
    assert f"scheduler: {__name__}:Shortest" in logged.text
    for wrong in ("no.such.Thing", "json:dumps", "collections.OrderedDict"):
        with pytest.raises(ConfigError, match="--scheduler-cls"):
            Stepper("--scheduler-cls", wrong)
    with pytest.raises(ConfigError, match="--scheduler-cls"):
        config_of("--scheduler-cls", "Nothing")


@pytest.mark.parametrize("blocks", [26, 40])
@pytest.mark.parametrize(
    "flags",
    [
        ("--max-num-partial-prefills", "4", "--max-long-partial-prefills", "2", "--long-prefill-token-threshold", "25"),
        ("--no-scheduler-reserve-full-isl",),
        ("--no-scheduler-reserve-full-isl", "--max-num-partial-prefills", "3", "--long-prefill-token-threshold", "30"),
        ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "104"),
    ],
    ids=["pieces", "unreserved", "unreserved_pieces", "whole"],
)
def test_tokens_are_the_same_and_everyone_is_served(flags: tuple[str, ...], blocks: int) -> None:
    """With little room: many preemptions, all blocks back, and no step over its budget."""
    rng = random.Random(blocks)
    budget = () if "--max-num-batched-tokens" in flags else ("--max-num-batched-tokens", "23")
    for seed in range(4):
        stepper = Stepper(
            *flags, *budget, "--max-num-seqs", "7", "--max-model-len", "104", "--block-size", "4", blocks=blocks
        )
        adds = [
            make_add(i, p, rng.randint(1, 40), priority=rng.randint(0, 3))
            for i, p in enumerate(random_prompts(40, seed))
        ]
        stepper.add(*adds[:20])
        for add in adds[20:]:
            stepper.step()
            stepper.add(add)
        stepper.run()
        for add in adds:
            assert stepper.tokens[add.request_id] == expected(add.prompt_token_ids, add.sampling.max_tokens)
