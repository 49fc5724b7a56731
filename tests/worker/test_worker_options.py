"""Options of workers and sampling, seen on a tiny model through the engine."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rayllm.config.model_facts import ModelFacts, read_model_facts
from rayllm.engine.engine import Engine
from rayllm.errors import ConfigError
from rayllm.messages.engine import Add
from rayllm.messages.ingress import RequestOutput
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.worker import StepPlan, StepResult
from rayllm.worker import memory
from rayllm.worker.worker import Worker
from rayllm_kernels.native.library import library
from tests.engine.options import config_of, resolved
from tests.models import VOCAB, make_tiny
from tests.worker.test_engine_on_model import Runner

GREEDY = {"temperature": 0.0, "max_tokens": 12, "seed": 1, "ignore_eos": True}
PROMPT = [5, 9, 11, 30, 31, 17]
Run = Callable[..., list[RequestOutput]]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return read_model_facts(str(make_tiny("llama", tmp_path_factory.mktemp("llama"))))


@pytest.fixture
def start(facts: ModelFacts) -> Iterator[Callable[..., Runner]]:
    """Start an engine as the options say."""
    runners: list[Runner] = []

    def make(*arguments: str) -> Runner:
        sizes = ("--dtype", "float32", "--max-num-seqs", "4", "--num-gpu-blocks-override", "40")
        given = [flag for flag in arguments if flag.startswith("--")]
        kept = [part for pair in zip(sizes[::2], sizes[1::2], strict=True) if pair[0] not in given for part in pair]
        runners.append(Runner(facts, config=config_of(*kept, *arguments, facts=facts)))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def ask(runner: Runner, **sampling: object) -> list[RequestOutput]:
    params = SamplingParams(**(GREEDY | sampling))
    runner.run([Add(request_id=0, prompt_token_ids=PROMPT, sampling=params, arrival_time=0.0)])
    return runner.outputs[0]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.option("logprobs-mode")
def test_values_beside_tokens_are_those_of_the_mode(start: Callable[..., Runner]) -> None:
    """Whole distributions of the next token and of the prompt's, against one another."""
    asked = {"temperature": 0.5, "top_k": 7, "max_tokens": 3, "logprobs": -1, "prompt_logprobs": -1}
    modes = ("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs")
    read = {mode: ask(start("--logprobs-mode", mode, "--max-num-batched-tokens", "4"), **asked) for mode in modes}
    assert len({tuple(tokens(outputs)) for outputs in read.values()}) == 1
    values = {}
    for mode, outputs in read.items():
        entries = [*outputs[0].prompt_logprobs[1:], *(entry for o in outputs for entry in o.logprobs)]
        assert [e.token_id for e in entries] == [*PROMPT[1:], *tokens(outputs)]
        values[mode] = np.full((len(entries), VOCAB), np.nan)
        for row, entry in zip(values[mode], entries, strict=True):
            row[entry.top_ids] = entry.top_logprobs
            assert entry.logprob == row[entry.token_id]
    logits = torch.from_numpy(values["raw_logits"])
    scaled = logits / 0.5
    scaled[scaled < torch.topk(scaled, 7, dim=1).values[:, -1:]] = -torch.inf
    for mode, wanted in (
        ("raw_logprobs", torch.log_softmax(logits, 1)),
        ("processed_logits", scaled),
        ("processed_logprobs", torch.log_softmax(scaled, 1)),
    ):
        np.testing.assert_allclose(values[mode], wanted.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.option("attention-backend", "override-attention-dtype")
def test_every_backend_gives_the_same_tokens(start: Callable[..., Runner], logged: pytest.LogCaptureFixture) -> None:
    wanted = tokens(ask(start()))
    for flags in (
        ("--attention-backend", "auto"), ("--attention-backend", "torch"), ("--override-attention-dtype", "float32"),
    ):  # fmt: skip
        logged.clear()
        assert tokens(ask(start(*flags))) == wanted, flags
        assert "operations for cpu: " in logged.text
    with pytest.raises(ConfigError, match="--attention-backend: 'FLASH_ATTN' is not supported"):
        config_of("--attention-backend", "FLASH_ATTN")
    with pytest.raises(ConfigError, match="--override-attention-dtype: 'bfloat16' is not what a CPU does"):
        config_of("--override-attention-dtype", "bfloat16")


@pytest.mark.option("enforce-eager")
def test_eager_is_what_a_cpu_does_anyway(start: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", refuse)
    assert tokens(ask(start("--enforce-eager"))) == tokens(ask(start("--no-enforce-eager")))


@pytest.mark.option("gpu-memory-utilization")
def test_half_the_share_is_half_the_blocks(facts: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(share: str) -> int:
        engine = Engine.build(config_of("--dtype", "float32", "--gpu-memory-utilization", share, facts=facts))
        engine.shutdown()
        return engine.stats().blocks_total

    monkeypatch.setattr("rayllm.worker.worker.available_memory", lambda: 50 << 20)
    assert blocks("0.8") == pytest.approx(2 * blocks("0.4"), abs=1)

    def kv_bytes(*arguments: str) -> int:
        return memory.default_kv_bytes(config_of(*arguments, facts=facts), 64 << 30, 1000)

    assert kv_bytes() == 2 << 30, "the default takes no more, whatever is free"
    whole, half = kv_bytes("--gpu-memory-utilization", "0.92"), kv_bytes("--gpu-memory-utilization", "0.46")
    assert whole == pytest.approx(0.4 * (64 << 30), rel=1e-6)
    assert half == pytest.approx(whole / 2, rel=1e-6)
    for wrong in ("0", "-0.5", "1.01"):
        with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
            config_of("--gpu-memory-utilization", wrong, facts=facts)


@pytest.mark.option("kv-cache-memory-bytes", "num-gpu-blocks-override", "block-size")
@pytest.mark.parametrize("block", [16, 32])
def test_the_cache_has_the_size_that_was_asked_for(
    facts: ModelFacts, logged: pytest.LogCaptureFixture, block: int
) -> None:
    flags = ("--dtype", "float32", "--max-num-seqs", "4", "--block-size", str(block))
    for more, blocks in (
        (("--kv-cache-memory-bytes", "1M", "--gpu-memory-utilization", "0.1"), None),
        (("--num-gpu-blocks-override", "33"), 33),
    ):
        logged.clear()
        engine = Engine.build(config_of(*flags, *more, facts=facts))
        blocks = blocks or (1 << 20) // engine._executor.kv_bytes_per_block()
        assert f"KV cache: {blocks} blocks of {block} tokens" in logged.text
        assert engine.stats().blocks_total == blocks
        engine.shutdown()


@pytest.mark.option("disable-hybrid-kv-cache-manager")
def test_windows_leave_room_for_more_tokens(
    tmp_path_factory: pytest.TempPathFactory, logged: pytest.LogCaptureFixture
) -> None:
    mixed = read_model_facts(str(make_tiny("gemma3", tmp_path_factory.mktemp("gemma3"))))
    usable, texts = [], []
    for flags in (("--disable-hybrid-kv-cache-manager",), (), ("--no-disable-hybrid-kv-cache-manager",)):
        logged.clear()
        size = ("--dtype", "float32", "--kv-cache-memory-bytes", "1M", "--max-num-batched-tokens", "16")
        runner = Runner(mixed, config=config_of(*size, *flags, facts=mixed))
        texts.append(tokens(ask(runner, max_tokens=200)))
        usable.append(int(logged.text.split(" usable tokens")[0].split()[-1]))
        runner.close()
    assert len(texts[0]) == 200
    assert texts[0] == texts[1] == texts[2]
    assert 2 * usable[0] < usable[1] == usable[2]


@pytest.mark.option("disable-cascade-attn")
@pytest.mark.skipif(library() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_attention_over_a_shared_prefix_is_computed_once(tmp_path: Path, name: str) -> None:
    model = read_model_facts(str(make_tiny(name, tmp_path, max_position_embeddings=1024)))
    prefix = [3 + i * i % 90 for i in range(600)]
    params = SamplingParams(temperature=0.0, max_tokens=8, seed=1, ignore_eos=True)

    def run(*flags: str) -> tuple[list[list[int]], int]:
        sizes = ("--num-gpu-blocks-override", "300", "--dtype", "bfloat16")
        runner = Runner(model, config=config_of(*sizes, *flags, facts=model))
        prompts = [PROMPT, *([*prefix, 3 + i, 4 + i] for i in range(8))]
        adds = [
            Add(request_id=i, prompt_token_ids=prompt, sampling=params, arrival_time=0.0)
            for i, prompt in enumerate(prompts)
        ]
        texts = runner.run(adds)
        steps = runner.engine.stats().cascade_steps
        runner.close()
        return texts, steps

    texts, steps = run()
    assert steps == 0
    texts_once, steps = run("--no-disable-cascade-attn")
    assert steps > 4
    assert texts_once == texts


@pytest.mark.option("disable-cascade-attn")
def test_cascade_attention_is_refused_where_there_is_none(
    facts: ModelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = "--no-disable-cascade-attn"
    with pytest.raises(ConfigError, match=f"{wanted}.*by itself"):
        config_of(wanted, "--attention-backend", "torch", facts=facts)
    slides = read_model_facts(str(make_tiny("mistral_window", tmp_path)))
    with pytest.raises(ConfigError, match=f"{wanted}.*every layer"):
        config_of(wanted, facts=slides)
    (note,) = resolved(wanted, "--no-enable-prefix-caching", facts=facts).notes
    assert note.startswith(f"{wanted} has no effect: ")
    monkeypatch.setattr("rayllm.worker.worker.library", lambda: None)
    with pytest.raises(ConfigError, match=f"{wanted}.*compiled"):
        Engine.build(config_of(wanted, facts=facts))


class Only:
    """Forbids all tokens but one."""

    name = "only"

    def __init__(self, model: ModelFacts) -> None:
        pass

    def __call__(self, logits_V: torch.Tensor, prompt: list[int], output: list[int], argument: object) -> torch.Tensor:
        allowed = 7 if argument is None else argument
        kept = logits_V[allowed].clone()
        logits_V[:] = float("-inf")
        logits_V[allowed] = kept
        return logits_V


class OnlyAlways(Only):
    """For every request."""

    every = True


@pytest.mark.option("logits-processors")
def test_a_logits_processor_decides(start: Callable[..., Runner]) -> None:
    named = start("--logits-processors", f"{__name__}.Only")
    assert tokens(ask(named)) != [7] * 12
    assert tokens(ask(named, extra_args={"only": 8})) == [8] * 12
    always = start("--logits-processors", f"{__name__}:OnlyAlways")
    assert tokens(ask(always)) == tokens(ask(always, temperature=1.0)) == [7] * 12
    assert tokens(ask(always, extra_args={"only": 8})) == [8] * 12
    with pytest.raises(AssertionError):
        ask(always, allowed_token_ids=(3,))
    assert "forbid every token" in always.outputs[0][-1].error
    with pytest.raises(ConfigError, match=r"--logits-processors: cannot load 'no\.such:Thing'"):
        start("--logits-processors", "no.such.Thing")


class Counting(Worker):
    """Counts its steps."""

    steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        return super().execute(plan)


class Extension:
    """Methods to call from outside."""

    def steps_and(self, more: int) -> tuple[int, int]:
        return self.steps, more


class Clash:
    """Has what workers have."""

    def execute(self) -> None:
        pass


@pytest.mark.option("worker-cls", "worker-extension-cls")
def test_a_worker_of_the_users_own(start: Callable[..., Runner], logged: pytest.LogCaptureFixture) -> None:
    wanted = tokens(ask(start()))
    runner = start("--worker-cls", f"{__name__}.Counting", "--worker-extension-cls", f"{__name__}.Extension")
    assert tokens(ask(runner)) == wanted
    ((steps, more),) = runner.engine.collective_rpc("steps_and", more=5)
    assert (steps >= 12, more) == (True, 5)
    assert f"worker: {__name__}:Counting" in logged.text
    with pytest.raises(AttributeError):
        runner.engine.collective_rpc("nothing")
    for flag, path in (("--worker-cls", "no.such.Thing"), ("--worker-cls", f"{__name__}.Extension"),
                       ("--worker-extension-cls", "no.such.Thing"), ("--worker-extension-cls", f"{__name__}.Clash")):  # fmt: skip  # noqa: E501
        with pytest.raises(ConfigError, match=flag):
            start(flag, path)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--kv-cache-memory-bytes", "100000000g"), "--kv-cache-memory-bytes"),
        (("--num-gpu-blocks-override", "100000000000000"), "--num-gpu-blocks-override"),
    ],
)
def test_a_cache_larger_than_the_memory_is_refused(facts: ModelFacts, arguments: tuple[str, ...], option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: .* cannot be had"):
        Engine.build(config_of("--dtype", "float32", *arguments, facts=facts))


def test_more_requests_than_the_memory_holds_are_refused(facts: ModelFacts) -> None:
    config = replace(config_of("--dtype", "float32", facts=facts), max_num_seqs=2**40)
    with pytest.raises(ConfigError, match="--max-num-seqs: there is no room"):
        Engine.build(config)
