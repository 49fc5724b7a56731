"""Engines over several processes: the tokens of one process, and a clear end when a process goes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rayllm import LLM, SamplingParams
from rayllm.errors import ConfigError, EngineDead, ModelError
from rayllm.messages.structured import StructuredOutputs
from tests.models import make_tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 9, 17, 33, 2, 7] * 6, [8, 1, 4], [98, 3, 2, 1, 5], [5, 9, 17, 33, 2, 7] * 5]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.9, seed=4, top_p=0.9, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1,
    repetition_penalty=1.2,
)  # fmt: skip
COMMON: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 96, "num_gpu_blocks_override": 64, "max_num_seqs": 8, "block_size": 4,
    "max_num_batched_tokens": 16, "skip_tokenizer_init": True, "use_tqdm_on_load": False,
}  # fmt: skip


class Extension:
    """Methods for every worker."""

    def where(self) -> dict[str, Any]:
        """The worker's process and CPUs, and how many layers it has."""
        layers = len(self._model.cache_specs())  # type: ignore[attr-defined]
        threads = self._config.threads  # type: ignore[attr-defined]
        return {"pid": os.getpid(), "layers": layers, "cpus": sorted(os.sched_getaffinity(0)), "threads": threads}

    def fail(self) -> None:
        """Raise."""
        raise ValueError("as asked")


def tokens(llm: LLM) -> list[Any]:
    out = []
    for sampling in (GREEDY, DRAWN):
        for result in llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling):
            logprobs = [one.token_id for one in result.outputs[0].logprobs or ()]
            out.append((result.outputs[0].token_ids, logprobs))
    return out


def until_it_fails(llm: LLM) -> None:
    for _ in range(3):
        llm.generate([{"prompt_token_ids": [1, 2]}], GREEDY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Any]:
    with LLM(str(model), **COMMON) as llm:
        return tokens(llm)


@pytest.mark.option(
    "tensor-parallel-size", "distributed-executor-backend", "worker-extension-cls", "max-parallel-loading-workers"
)
def test_two_ranks_to_a_layer(model: Path, wanted: list[Any]) -> None:
    extension = f"{__name__}.Extension"
    with LLM(
        str(model), tensor_parallel_size=2, worker_extension_cls=extension, max_parallel_loading_workers=1, **COMMON
    ) as llm:
        assert tokens(llm) == wanted
        assert tokens(llm) == wanted  # by prefix hits
        found = llm.collective_rpc("where")
        assert len({one["pid"] for one in found} | {os.getpid()}) == 3
        with pytest.raises(AttributeError):
            llm.collective_rpc("nowhere")
        with pytest.raises(ValueError, match="as asked"):
            llm.collective_rpc("fail")
        with pytest.raises(TypeError, match="plain data"):
            llm.collective_rpc("where", object())
        form = SamplingParams(
            temperature=0.0, max_tokens=8, structured_outputs=StructuredOutputs(choice=["a"]), ignore_eos=True
        )
        with pytest.raises(Exception, match=r"structured outputs|tokenizer"):
            llm.generate([{"prompt_token_ids": [1, 2]}], form)
        assert tokens(llm) == wanted
        os.kill(found[1]["pid"], signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"worker [01]"):
            until_it_fails(llm)
    end = time.monotonic() + 10
    while Path(f"/proc/{found[0]['pid']}").exists():
        assert time.monotonic() < end, "a rank outlives its engine"
        time.sleep(0.05)


@pytest.mark.option("pipeline-parallel-size")
def test_two_stages_of_two_ranks(model: Path, wanted: list[Any]) -> None:
    with LLM(
        str(model), tensor_parallel_size=2, pipeline_parallel_size=2, worker_extension_cls=f"{__name__}.Extension",
        **COMMON,
    ) as llm:  # fmt: skip
        assert tokens(llm) == wanted
        layers = [one["layers"] for one in llm.collective_rpc("where")]
        assert layers[0] == layers[1]
        assert layers[2] == layers[3]
        assert layers[0] + layers[2] == 2 * max(layers[0], layers[2]) or abs(layers[0] - layers[2]) == 1


@pytest.mark.skipif(shutil.which("numactl") is None or os.cpu_count() == 1, reason="no numactl, or one CPU")
@pytest.mark.option("numa-bind", "numa-bind-nodes", "numa-bind-cpus")
def test_workers_are_bound_to_their_cpus(model: Path, wanted: list[Any]) -> None:
    bound = {"numa_bind": True, "numa_bind_nodes": [0, 0], "numa_bind_cpus": ["0", "0-1"]}
    extension = f"{__name__}.Extension"
    with LLM(str(model), tensor_parallel_size=2, worker_extension_cls=extension, **bound, **COMMON) as llm:
        found = llm.collective_rpc("where")
        assert [(one["cpus"], one["threads"]) for one in found] == [([0], 1), ([0, 1], 2)]
        assert tokens(llm) == wanted


def test_a_model_that_cannot_be_loaded_is_told_as_by_one_process(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(ModelError, match="missing"):
        LLM(str(tmp_path), tensor_parallel_size=2, **COMMON)


@pytest.mark.option("master-port", "distributed-timeout-seconds", "nnodes")
def test_a_node_that_does_not_come_ends_the_start(model: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"not all of the 2 workers came within 2 s.*--master-port 29517"):
        LLM(str(model), tensor_parallel_size=2, nnodes=2, master_port=29517, distributed_timeout_seconds=2, **COMMON)
    assert time.monotonic() - began < 30


LAUNCHED = """
import sys
from rayllm import LLM
from tests.executor.test_ranked import COMMON, tokens
with LLM(sys.argv[1], tensor_parallel_size=2, distributed_executor_backend="external_launcher", **COMMON) as llm:
    print("TOKENS", tokens(llm))
"""


@pytest.mark.option("distributed-executor-backend")
def test_processes_that_torchrun_started(model: Path, wanted: list[Any], tmp_path: Path) -> None:
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(script), str(model)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False
    )
    said = [line for line in done.stdout.splitlines() if "TOKENS" in line]
    assert len(said) == 2, done.stderr[-3000:]
    assert said[0].endswith(str(wanted))
    assert said[1].endswith(str(wanted))


def test_a_process_without_a_launcher_is_told_so(model: Path) -> None:
    with pytest.raises(ConfigError, match="--distributed-executor-backend: external_launcher needs the environment"):
        LLM(str(model), distributed_executor_backend="external_launcher", **COMMON)
