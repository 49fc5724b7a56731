"""A request's tokens and log-probabilities are the same numbers, to the last bit, whatever is computed beside it.

Tiny random models through the real engine: alone, and among up to 63 others of all lengths and kinds; prompts whole and
in chunks, with and without cached prefixes, with one thread and two.
"""

import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rayllm.config.engine import EngineConfig
from rayllm.config.model_facts import ModelFacts, read_model_facts
from rayllm.engine.engine import Engine
from rayllm.kv.layout import KVLayout, group_layers
from rayllm.messages.engine import Add
from rayllm.messages.ingress import RequestOutput, TokenLogprobs
from rayllm.messages.sampling import SamplingParams
from rayllm.model.families import spec_of
from rayllm_kernels.native.library import library
from tests.models import VOCAB, make_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library() is None, reason="no C++ compiler here; torch's own products depend on the batch"),
]
MODELS = {"llama": {}, "gemma2": {"num_key_value_heads": 3}, "mistral_window": {"sliding_window": 40}}
SETTINGS = list(itertools.product((16, 64, 512), (False, True), (1, 2)))
"""Tokens in a step, prefix caching, threads."""
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "seed": 5, "logprobs": 0},
    {"temperature": 1.1, "seed": 6, "top_p": 0.9, "top_k": 30, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.2, "prompt_logprobs": 1, "logprobs": 1},
)


@dataclass(frozen=True)
class Answer:
    """All that a request gets, floats as they are."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None] | None


def make_adds() -> list[Add]:
    """64 requests of every kind, some beginning alike, prompts of 1 to 300 tokens."""
    rng = random.Random(3)
    stems = [[rng.randrange(3, VOCAB) for _ in range(300)] for _ in range(2)]
    lengths = [1, 2, 15, 16, 17, 255, 256, 257, 300]
    adds = []
    for i in range(64):
        length = lengths[i] if i < len(lengths) else rng.choice((1, 5, 20, 33, rng.randint(1, 100)))
        prompt = rng.choice(stems)[:length] if i % 2 else [rng.randrange(3, VOCAB) for _ in range(length)]
        sampling = SamplingParams(**{"max_tokens": rng.randint(2, 12), "seed": 1, "ignore_eos": True} | KINDS[i % 5])
        adds.append(
            Add(request_id=i, prompt_token_ids=prompt, output_token_ids=[], sampling=sampling, arrival_time=0.0)
        )
    return adds


ADDS = make_adds()


class Runner:
    """An engine, and what it said."""

    def __init__(
        self, facts: ModelFacts, dtype: str, tokens: int, caching: bool, threads: int, layout: KVLayout | None = None
    ) -> None:
        config = EngineConfig(
            model=facts, dtype=dtype, max_model_len=320, num_blocks=700, block_size=16, max_num_seqs=64,
            max_num_batched_tokens=tokens, enable_prefix_caching=caching, threads=threads,
            kv_layout=layout or KVLayout(),
        )  # fmt: skip
        self.engine = Engine.build(config)
        self._outputs: dict[int, list[RequestOutput]] = {}
        self._changed = threading.Condition()
        self.engine.start(self._deliver)

    def run(self, ids: list[int]) -> dict[int, Answer]:
        self._outputs = {i: [] for i in ids}
        for i in ids:
            self.engine.add(0, ADDS[i])
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(outputs and outputs[-1].finish_reason for outputs in self._outputs.values()), timeout=120
            )
        return {i: answer(outputs) for i, outputs in self._outputs.items()}

    def close(self) -> None:
        self.engine.shutdown()
        self.engine.check()

    def _deliver(self, outputs: dict[int, list[RequestOutput]], load: object) -> None:
        with self._changed:
            for output in outputs.get(0, ()):
                self._outputs[output.request_id].append(output)
            self._changed.notify_all()


def answer(outputs: list[RequestOutput]) -> Answer:
    assert not any(output.error for output in outputs)
    prompt = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return Answer(
        [token for output in outputs for token in output.token_ids],
        [entry for output in outputs for entry in output.logprobs or ()],
        prompt[0] if prompt else None,
    )


Alone = Callable[[str, str], tuple[ModelFacts, dict[int, Answer]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A model and a dtype to the model's facts, and every request's answer when it runs by itself, uncut."""
    folders: dict[str, Path] = {}
    known: dict[tuple[str, str], tuple[ModelFacts, dict[int, Answer]]] = {}

    def get(model: str, dtype: str) -> tuple[ModelFacts, dict[int, Answer]]:
        if model not in folders:
            changes = {"max_position_embeddings": 512, "num_hidden_layers": 2, **MODELS[model]}
            folders[model] = make_tiny(model, tmp_path_factory.mktemp(model), **changes)
        if (model, dtype) not in known:
            facts = read_model_facts(str(folders[model]))
            runner = Runner(facts, dtype, 512, caching=False, threads=1)
            known[model, dtype] = facts, {i: runner.run([i])[i] for i in range(len(ADDS))}
            runner.close()
        return known[model, dtype]

    return get


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tokens", "caching", "threads"), SETTINGS)
def test_same_answer_in_every_batch(
    alone: Alone, model: str, dtype: str, tokens: int, caching: bool, threads: int
) -> None:
    facts, wanted = alone(model, dtype)
    rng = random.Random(tokens + caching)
    runner = Runner(facts, dtype, tokens, caching, threads, group_layers(spec_of(facts).windows, 320))
    for size in (2, 3, 7, 20, 64):
        ids = rng.sample(range(len(ADDS)), size)
        for i, got in runner.run(ids).items():
            assert got == wanted[i], (size, i)
    runner.close()


def test_the_requests_are_worth_comparing(alone: Alone) -> None:
    """Answers differ between requests and between dtypes, so that equality says something."""
    _, exact = alone("llama", "float32")
    _, narrow = alone("llama", "bfloat16")
    assert len({tuple(one.tokens) for one in exact.values()}) > 50
    assert sum(exact[i].logprobs != narrow[i].logprobs for i in exact) > 40
