"""What the turns compare: the figures of commands, the prompts of workloads, the CPU time of processes."""

import pytest

from benchmarks import turns
from benchmarks.turns import WORKLOADS, cpu_ms_a_token, figures_in, medians, prompts_of


def test_figures_are_those_of_the_last_object_that_was_printed() -> None:
    output = 'loading\n{"c4_tok_s": 1}\n{"c4_tok_s": 2.5, "engine": "x", "threads": 2}\n[3]\nbye'
    assert figures_in(output) == {"c4_tok_s": 2.5}


def test_the_line_of_a_single_stream_benchmark_gives_the_same_names() -> None:
    output = "prefill(1024) 557.0 tok/s, decode 77.5 tok/s"
    assert figures_in(output) == {"prefill1k_tok_s": 557.0, "decode1_tok_s": 77.5}


def test_output_without_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="no figures"):
        figures_in("nothing\n")


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_are_as_the_workload_says_and_repeat_only_with_the_seed(name: str) -> None:
    workload = WORKLOADS[name]
    prompts = prompts_of(workload, "a")
    assert len(prompts) == workload.requests
    assert {len(prompt) for prompt in prompts} == {workload.shared + workload.input_tokens}
    assert len({tuple(prompt[: workload.shared]) for prompt in prompts}) == 1
    assert len({tuple(prompt[: workload.shared + 16]) for prompt in prompts}) == len(prompts)
    assert prompts == prompts_of(workload, "a")
    assert not {tuple(p[:16]) for p in prompts} & {tuple(p[:16]) for p in prompts_of(workload, "b")}


def test_cpu_time_is_summed_by_name_over_processes_that_lived_through_it() -> None:
    before = {1: ("a", 1.0), 2: ("a", 2.0), 3: ("b", 0.0), 4: ("idle", 5.0)}
    after = {1: ("a", 1.5), 2: ("a", 2.5), 3: ("b", 1.0), 4: ("idle", 5.0), 5: ("new", 9.0)}
    assert cpu_ms_a_token(before, after, tokens=100) == {"a": 10.0, "b": 10.0}


def test_small_shares_of_the_cpu_time_are_left_out() -> None:
    assert cpu_ms_a_token({1: ("a", 0), 2: ("b", 0)}, {1: ("a", 99), 2: ("b", 1)}, 10, least=0.02) == {"a": 9900}


def test_cpu_time_of_this_process_is_the_clients_and_not_counted() -> None:
    import os

    used = turns.cpu_seconds()
    assert os.getpid() not in used
    assert all(seconds >= 0 for _, seconds in used.values())


def test_medians_take_a_missing_name_for_zero() -> None:
    assert medians([{"a": 1.0}, {"a": 3.0, "b": 6.0}, {"a": 9.0, "b": 2.0}]) == {"a": 3.0, "b": 2.0}


def test_unknown_workloads_and_peers_without_a_name_end_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("servers --ours u --peer a=b --workloads c5", "servers --ours u --peer b"):
        with pytest.raises(SystemExit):
            turns.parse(line.split())
    assert "unknown workloads: c5" in capsys.readouterr().err


def test_programs_are_compared_on_the_figures_that_both_have() -> None:
    args = turns.parse([
        "programs", "--rounds", "2", "--ours", """echo '{"c4_tok_s": 6, "c16_tok_s": 9}'""",
        "--peer", """x=echo '{"c4_tok_s": 3}'""", "--peer", "y=echo prefill(1024) 1 tok/s, decode 2 tok/s",
    ])  # fmt: skip
    first, second = args.compare(args)
    assert first["figures"] == {"c4_tok_s": {"ours": [6, 6], "peer": [3, 3]}}
    assert second["figures"] == {}


def test_a_command_that_fails_ends_the_comparison() -> None:
    with pytest.raises(SystemExit, match="exit status 1"):
        turns.run_program("false")
