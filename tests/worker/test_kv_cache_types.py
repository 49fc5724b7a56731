"""Options of how keys and values are stored, seen on tiny models through the engine and its worker."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayllm.config.model_facts import ModelFacts, read_model_facts
from rayllm.engine.engine import Engine
from rayllm.errors import ConfigError, ModelError
from rayllm.messages.engine import Add
from rayllm.messages.sampling import SamplingParams
from rayllm.model.sharded_state import save_sharded_state
from rayllm.worker.worker import Worker, parts_of
from rayllm_kernels.native.library import library
from rayllm_kernels.storage import DTYPES, LARGEST
from tests.engine.options import config_of, resolved
from tests.models import VOCAB, make_tiny
from tests.worker.test_engine_on_model import Runner

EIGHT_BITS = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head")
BACKENDS = ("torch", *(["auto"] if library() is not None else []))
SIZES = ("--dtype", "float32", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64")
PROMPTS = [[3 + (i * 7 + j * j) % (VOCAB - 3) for j in range(5 + 9 * i)] for i in range(4)]
Start = Callable[..., Runner]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, two of whose three layers have windows."""
    changes = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "head_dim": 16}
    return make_tiny("qwen2", tmp_path_factory.mktemp("qwen2"), **changes)


@pytest.fixture(scope="module")
def facts(folder: Path) -> ModelFacts:
    return read_model_facts(str(folder))


@pytest.fixture
def start(facts: ModelFacts) -> Iterator[Start]:
    """Start an engine as the options say."""
    runners: list[Runner] = []

    def make(*arguments: str, facts: ModelFacts = facts) -> Runner:
        runners.append(Runner(facts, config=config_of(*SIZES, *arguments, facts=facts)))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def worker_of(runner: Runner) -> Worker:
    return runner.engine._executor._worker


def stored(runner: Runner) -> list[torch.dtype]:
    """The type of each layer's cache."""
    return [parts_of(cache)[0].dtype for cache in worker_of(runner)._caches]


def ask(runner: Runner, prompts: list[list[int]] = PROMPTS) -> list[torch.Tensor]:
    """All log-probabilities of the tokens after the first of each prompt."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, seed=1, ignore_eos=True, prompt_logprobs=-1)
    adds = [
        Add(request_id=i, prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0)
        for i, prompt in enumerate(prompts)
    ]
    runner.run(adds)
    answers = []
    for i, prompt in enumerate(prompts):
        rows = torch.zeros(len(prompt) - 1, VOCAB)
        for row, entry in zip(rows, runner.outputs[i][0].prompt_logprobs[1:], strict=True):
            row[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
        answers.append(rows)
    return answers


def difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The mean of the absolute differences."""
    return float((torch.cat(some) - torch.cat(others)).abs().mean())


@pytest.mark.option("kv-cache-dtype")
@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_bits_take_less_and_answer_nearly_the_same(start: Start, facts: ModelFacts, backend: str) -> None:
    """And the same bits whatever else is in the batch, however it is cut."""
    plain = start("--attention-backend", backend)
    wanted, size = ask(plain), worker_of(plain).kv_bytes_per_block()
    usual = float(torch.cat(wanted).abs().mean())
    answers = {}
    for name in ("float16", *EIGHT_BITS):
        flags = ("--attention-backend", backend, "--kv-cache-dtype", name)
        runner = start(*flags, "--max-num-batched-tokens", "16")
        dtype = DTYPES[{"fp8": "fp8_e4m3"}.get(name, name)]
        assert set(stored(runner)) == {dtype}
        scales = size // 16 if name.endswith("per_token_head") else 0  # one for 16 entries
        assert worker_of(runner).kv_bytes_per_block() == size * dtype.itemsize // 4 + scales
        answers[name] = ask(runner)
        near = {"float16": 0.001, "fp8_e5m2": 0.06}.get(name, 0.03)  # a random model, which every error upsets
        assert 0 < difference(answers[name], wanted) < usual * near, name
        if backend == "auto":
            alone = start(*flags)
            for prompt, got in zip(PROMPTS, answers[name], strict=True):
                assert torch.equal(ask(alone, [prompt])[0], got), name
    assert all(map(torch.equal, answers["fp8"], answers["fp8_e4m3"]))
    assert difference(answers["fp8_e5m2"], wanted) > difference(answers["fp8_e4m3"], wanted)

    def blocks(*arguments: str) -> int:
        engine = Engine.build(config_of(*SIZES[:4], "--kv-cache-memory-bytes", "1M", *arguments, facts=facts))
        engine.shutdown()
        return engine.stats().blocks_total

    assert blocks() == (1 << 20) // size
    assert blocks("--kv-cache-dtype", "fp8") == (1 << 20) * 4 // size
    assert blocks("--kv-cache-dtype", "int8_per_token_head") == (1 << 20) * 4 * 16 // (size * 20)


@pytest.mark.option("kv-cache-dtype")
@pytest.mark.parametrize(
    "name",
    ["bfloat16", "fp8_ds_mla", "fp8_inc", "nvfp4", "turboquant_3bit_nc", "turboquant_4bit_nc", "turboquant_k3v4_nc",
     "turboquant_k8v4"],
)  # fmt: skip
def test_other_types_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype: '{name}'.*(choose fp8|leave it out)"):
        config_of("--kv-cache-dtype", name)


@pytest.mark.option("kv-cache-dtype")
def test_automatic_length_grows_with_narrow_numbers() -> None:
    flags = ("--max-model-len", "auto", "--kv-cache-memory-bytes", "96k")
    plain = config_of(*flags).max_model_len
    assert plain == 96000 // (2 * 3 * 2 * 16 * 4 * 16) * 16
    assert config_of(*flags, "--kv-cache-dtype", "float16").max_model_len == 2 * plain + 16
    for name, size in (("fp8", 16), ("int8_per_token_head", 20)):
        got = config_of(*flags, "--kv-cache-dtype", name, "--kv-cache-dtype-skip-layers", "0").max_model_len
        assert got == 96000 // (2 * 2 * (16 * 4 + 2 * size) * 16) * 16


@pytest.mark.option("kv-cache-dtype-skip-layers")
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_left_out_keep_the_dtype(start: Start, backend: str) -> None:
    plain, narrow = torch.float32, torch.float8_e4m3fn
    flags = ("--attention-backend", backend, "--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers")
    wanted = ask(start("--attention-backend", backend))
    for names, dtypes in (
        (["0"], [plain, narrow, narrow]),
        (["0", "2"], [plain, narrow, plain]),
        (["sliding_window"], [narrow, plain, plain]),
        (["sliding_window", "0"], [plain, plain, plain]),
    ):
        runner = start(*flags, *names)
        assert stored(runner) == dtypes
        assert (difference(ask(runner), wanted) == 0) == (dtypes == [plain] * 3), names
    for wrong in ("3", "-1", "full_attention", "x"):
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype-skip-layers: '{wrong}' is neither"):
            config_of("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", f'["{wrong}"]')
    (note,) = resolved("--kv-cache-dtype-skip-layers", "0").notes
    assert "has no effect" in note


@pytest.mark.option("kv-cache-dtype-skip-layers")
def test_layers_of_different_types_share_no_blocks(facts: ModelFacts) -> None:
    """Else those with windows would give back blocks that fit no other layer."""
    assert config_of("--kv-cache-dtype", "fp8", facts=facts).kv_layout.sliding
    both = resolved("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0", facts=facts)
    assert not both.engine.kv_layout.sliding
    (note,) = both.notes
    assert note.startswith("--kv-cache-dtype-skip-layers makes layers with a window keep all tokens")


@pytest.mark.option("calculate-kv-scales")
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_are_measured_in_the_first_step(start: Start, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    flags = ("--attention-backend", backend, "--kv-cache-dtype", "fp8_e4m3")
    plain, fixed = start("--attention-backend", backend), start(*flags)
    wanted = ask(plain)
    without = difference(ask(fixed), wanted)
    assert worker_of(fixed)._model.kv_scales() == [(1.0, 1.0)] * 3
    runner = start(*flags, "--calculate-kv-scales", "--kv-cache-dtype-skip-layers", "1")
    model = worker_of(runner)._model
    assert model.kv_scales() == [(1.0, 1.0)] * 3
    assert difference(ask(runner), wanted) < without * 2
    first, kept, last = model.kv_scales()
    assert kept == (1.0, 1.0)
    assert all(scale not in (0.0, 1.0) for scale in (*first, *last))
    assert "scales of keys and values: [(" in caplog.text
    again = ask(runner)
    assert model.kv_scales() == [first, kept, last]
    assert difference(again, wanted) < without * 2


@pytest.mark.option("calculate-kv-scales")
def test_measuring_scales_is_deprecated() -> None:
    deprecated, *more = resolved("--kv-cache-dtype", "fp8", "--calculate-kv-scales").notes
    assert deprecated.startswith("--calculate-kv-scales is deprecated")
    assert more == []
    for name in ("auto", "int8_per_token_head"):
        notes = resolved("--kv-cache-dtype", name, "--calculate-kv-scales").notes
        assert any("--calculate-kv-scales has no effect" in note for note in notes)


@pytest.mark.option("kv-cache-dtype", "calculate-kv-scales")
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_come_from_the_checkpoint(start: Start, folder: Path, tmp_path: Path, backend: str) -> None:
    """Of either shape and under the names that checkpoints use; the finished share of a rank keeps them."""
    tensors = load_file(folder / "model.safetensors")
    names = ("self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.attn.k_scale")
    for i, name in enumerate(names):
        tensors[f"model.layers.{i}.{name}"] = torch.tensor(0.25 + i)
        tensors[f"model.layers.{i}.{name.replace('k_', 'v_')}"] = torch.tensor([0.5 + i])
    tensors["model.layers.0.self_attn.q_scale"] = torch.tensor(2.0)
    scaled, share = tmp_path / "scaled", tmp_path / "share"
    scaled.mkdir()
    for file in folder.glob("*.json"):
        (scaled / file.name).write_bytes(file.read_bytes())
    save_file(tensors, scaled / "model.safetensors", metadata={"format": "pt"})
    flags = ("--attention-backend", backend, "--kv-cache-dtype", "fp8")
    runner = start(*flags, facts=read_model_facts(str(scaled)))
    wanted = [(0.25 + i, 0.5 + i) for i in range(3)]
    assert worker_of(runner)._model.kv_scales() == wanted
    assert difference(ask(runner), ask(start(*flags))) > 0
    save_sharded_state(config_of(*SIZES, facts=read_model_facts(str(scaled))), share)
    sharded = start(*flags, "--load-format", "sharded_state", facts=read_model_facts(str(share)))
    assert worker_of(sharded)._model.kv_scales() == wanted
    assert difference(ask(runner), ask(sharded)) == 0
    for wrong in (0.0, float("nan")):
        save_file(tensors | {"model.layers.1.self_attn.k_scale": torch.tensor(wrong)}, scaled / "model.safetensors")
        with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.k_scale.*must be a positive number"):
            start(*flags, facts=read_model_facts(str(scaled)))


def test_every_type_of_eight_bits_is_known() -> None:
    assert {DTYPES[name] for name in EIGHT_BITS if name != "fp8"} == set(LARGEST)
