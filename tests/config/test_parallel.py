"""How an engine is divided among workers, as options say, or the option at fault."""

from dataclasses import replace

import pytest

from rayllm.config.engine import EngineConfig
from rayllm.config.environment import Environment
from rayllm.config.hardware import Hardware
from rayllm.config.parallel import check_served
from rayllm.errors import ConfigError
from tests.config.test_resolve import MACHINE, resolved

NUMA = replace(MACHINE, numactl=True, numa_nodes=(0, 1))


def engine(*arguments: str, machine: Hardware = MACHINE) -> EngineConfig:
    return resolved(*arguments, machine=machine).engine


def test_ranks_are_numbered_stage_by_stage() -> None:
    settings = engine("-tp", "3", "-pp", "2").parallel
    assert (settings.tensor, settings.stages, settings.size, settings.executor) == (3, 2, 6, None)
    assert list(settings.local) == list(range(6))
    assert engine().parallel.size == 1


@pytest.mark.option("nnodes", "node-rank", "master-addr", "master-port")
def test_nodes_divide_the_ranks() -> None:
    settings = engine("-tp", "4", "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1").parallel
    assert (list(settings.local), settings.executor, settings.master) == ([2, 3], "mp", ("10.0.0.1", 29501))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-tp", "2", "--distributed-executor-backend", "uni"], "--distributed-executor-backend: uni runs one worker"),
        (["--nnodes", "2", "--node-rank", "2", "-tp", "2"], "--node-rank: 2 is not below --nnodes, 2"),
        (["--nnodes", "2", "-tp", "3"], "--nnodes: 3 workers cannot be divided among 2 nodes"),
        (["--nnodes", "2", "-tp", "2", "--distributed-executor-backend", "ray"], "--nnodes: ray does not start nodes"),
        (
            ["--distributed-executor-backend", "external_launcher", "-tp", "2", "--max-parallel-loading-workers", "1"],
            "--max-parallel-loading-workers: processes that a launcher started",
        ),
        (["--numa-bind-nodes", "0", "-tp", "1"], "--numa-bind-nodes: needs --numa-bind"),
        (["--numa-bind"], "--numa-bind: binds worker processes, and there are none"),
        (["--numa-bind", "-tp", "2", "--numa-bind-nodes", "0"], "--numa-bind-nodes: has 1 entries for 2 workers"),
        (["--numa-bind", "-tp", "2", "--numa-bind-nodes", "0", "7"], "--numa-bind-nodes: .* no NUMA node 7"),
        (["--numa-bind", "-tp", "2", "--numa-bind-cpus", "0", "1-"], "--numa-bind-cpus: '1-' is no list of CPUs"),
    ],
)
@pytest.mark.option("numa-bind", "numa-bind-nodes", "numa-bind-cpus", "distributed-executor-backend", "nnodes")
def test_contradictions_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(*arguments, machine=NUMA)


@pytest.mark.option("ray-workers-use-nsight")
def test_only_workers_of_ray_run_under_nsight() -> None:
    assert engine("-tp", "2", "--ray-workers-use-nsight").parallel.executor == "ray"
    with pytest.raises(ConfigError, match="--ray-workers-use-nsight: mp has no Ray workers"):
        engine("-tp", "2", "--ray-workers-use-nsight", "--distributed-executor-backend", "mp")


@pytest.mark.option("distributed-executor-backend")
def test_a_server_is_started_by_nobody_else() -> None:
    with pytest.raises(ConfigError, match="--distributed-executor-backend: external_launcher is for an LLM"):
        check_served(engine("--distributed-executor-backend", "external_launcher").parallel)


@pytest.mark.option("numa-bind", "numa-bind-nodes", "numa-bind-cpus")
def test_workers_are_bound_by_numactl() -> None:
    bound = ("--numa-bind", "-tp", "2")
    assert engine(*bound, machine=NUMA).parallel.numactl == (
        ("--cpunodebind=0", "--membind=0"),
        ("--cpunodebind=1", "--membind=1"),
    )
    chosen = engine(*bound, "--numa-bind-nodes", "1", "1", "--numa-bind-cpus", "0-3", "4,6", machine=NUMA)
    assert chosen.parallel.numactl == (("--physcpubind=0-3", "--membind=1"), ("--physcpubind=4,6", "--membind=1"))
    with pytest.raises(ConfigError, match="--numa-bind: the program numactl is not installed"):
        engine(*bound, machine=replace(NUMA, numactl=False))


def test_options_with_nothing_to_do_are_noted() -> None:
    notes = resolved("--distributed-timeout-seconds", "5", "--master-port", "1234").notes
    assert any("--distributed-timeout-seconds has no effect" in note for note in notes)
    assert any("--master-port has no effect without --nnodes" in note for note in notes)


def test_what_workers_ask_of_ray_comes_from_the_environment() -> None:
    read = Environment.read({"RLLM_WORKER_RESOURCES": '{"CPU": 2, "fast": 0.5}', "RLLM_WORKER_LABELS": '{"zone": "a"}'})
    assert read.worker_resources == (("CPU", 2.0), ("fast", 0.5))
    assert read.worker_labels == (("zone", "a"),)
    for name, text in (
        ("RLLM_WORKER_RESOURCES", "{"),
        ("RLLM_WORKER_RESOURCES", '{"CPU": "2"}'),
        ("RLLM_WORKER_RESOURCES", '{"CPU": -1}'),
        ("RLLM_WORKER_LABELS", '["a"]'),
    ):
        with pytest.raises(ConfigError, match=name):
            Environment.read({name: text})
