"""The engine with a real worker on a tiny model: tokens depend on the request and nothing else."""

import random
import threading
from pathlib import Path

import pytest

from rayllm.config.engine import EngineConfig
from rayllm.config.model_facts import ModelFacts, read_model_facts
from rayllm.engine.engine import Engine
from rayllm.kv.layout import group_layers
from rayllm.messages.engine import Add
from rayllm.messages.ingress import RequestOutput
from rayllm.messages.sampling import SamplingParams, Thinking
from tests.models import VOCAB, make_tiny

pytestmark = pytest.mark.slow  # the engine's properties are held by tests/engine too, over a fake model
KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 5},
    "filtered": {"temperature": 1.2, "seed": 6, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    "constrained": {"temperature": 0.7, "seed": 7, "logit_bias": {3: 4.0}, "bad_words_ids": ((9,), (3, 4)),
                    "min_tokens": 5, "thinking": Thinking(budget=4, inside=True, begin_ids=((6,),), mark_ids=((5,),),
                                                          end_ids=(8, 5))},
}  # fmt: skip
PIECES = {"max_num_batched_tokens": 16, "max_partial_prefills": 3, "max_long_partial_prefills": 2,
          "long_prefill_tokens": 20}  # fmt: skip
HYBRID = {"kv_layout": group_layers([None if i == 5 else 6 for i in range(6)], 160), "num_blocks": 60,
          "max_num_batched_tokens": 7, "reserve_whole_prompt": False}  # fmt: skip


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFacts]:
    return {n: read_model_facts(str(make_tiny(n, tmp_path_factory.mktemp(n)))) for n in ("llama", "gemma3")}


class Runner:
    def __init__(self, facts: ModelFacts, config: EngineConfig | None = None, **changes: object) -> None:
        values = {"max_model_len": 160, "num_blocks": 64, "block_size": 4, "max_num_seqs": 16, "threads": 1} | changes
        self.engine = Engine.build(config or EngineConfig(model=facts, dtype="float32", **values))
        self.outputs: dict[int, list[RequestOutput]] = {}
        self._changed = threading.Condition()
        self.engine.start(self._deliver)

    def _deliver(self, outputs: dict[int, list[RequestOutput]], load: object) -> None:
        with self._changed:
            for item in outputs.get(0, ()):
                self.outputs.setdefault(item.request_id, []).append(item)
            self._changed.notify_all()

    def run(self, adds: list[Add]) -> list[list[int]]:
        self.outputs.clear()
        for add in adds:
            self.engine.add(0, add)
        with self._changed:
            ids = [add.request_id for add in adds]
            assert self._changed.wait_for(
                lambda: all(i in self.outputs and self.outputs[i][-1].finish_reason for i in ids), timeout=60
            )
        errors = [o.error for outputs in self.outputs.values() for o in outputs if o.error]
        assert not errors, errors
        return [[t for o in self.outputs[i] for t in o.token_ids] for i in ids]

    def close(self) -> None:
        self.engine.shutdown()
        self.engine.check()


def make_adds(seed: int = 0) -> list[Add]:
    """Requests of all kinds, many with common beginnings, some of them choices of one request."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, VOCAB) for _ in range(30)] for _ in range(3)]
    adds = []
    for i in range(18):
        name = list(KINDS)[i % len(KINDS)]
        prompt = rng.choice(stems)[: rng.randint(1, 30)] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 9))]
        sampling = SamplingParams(**{"max_tokens": rng.randint(5, 40), "seed": 1, "logprobs": 1} | KINDS[name])
        for choice in range(3 if i % 7 == 0 else 1):
            adds.append(
                Add(
                    request_id=len(adds), prompt_token_ids=prompt, output_token_ids=[], sampling=sampling,
                    choice_index=choice, arrival_time=0.0,
                )
            )  # fmt: skip
    return adds


@pytest.fixture(scope="module")
def alone(facts: dict[str, ModelFacts]) -> dict[str, list[list[int]]]:
    """Each request by itself, without chunks, prefix hits or preemption."""
    out = {}
    for name, fact in facts.items():
        runner = Runner(fact, enable_prefix_caching=False, async_scheduling=False)
        out[name] = [runner.run([add])[0] for add in make_adds()]
        runner.close()
    return out


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama", {}),
        ("llama", {"async_scheduling": False}),
        ("llama", {"max_num_batched_tokens": 7}),
        ("llama", {"num_blocks": 41, "max_num_batched_tokens": 16}),
        ("llama", {"num_blocks": 41, "enable_prefix_caching": False}),
        ("llama", {"max_num_seqs": 3}),
        ("llama", PIECES),
        ("llama", PIECES | {"num_blocks": 41, "reserve_whole_prompt": False}),
        ("llama", {"chunked_prefill": False, "max_num_batched_tokens": 160}),
        ("gemma3", {"num_blocks": 41, "max_num_batched_tokens": 16}),
        ("gemma3", HYBRID),
        ("gemma3", HYBRID | PIECES | {"num_blocks": 80, "enable_prefix_caching": False}),
        ("gemma3", HYBRID | {"attention_backend": "torch"}),
    ],
    ids=[
        "batched",
        "sync",
        "chunked",
        "preempted",
        "preempted_uncached",
        "few_rows",
        "pieces",
        "unreserved",
        "whole",
        "windows",
        "hybrid",
        "hybrid_uncached",
        "hybrid_torch",
    ],
)
def test_same_tokens_in_any_company(
    facts: dict[str, ModelFacts], alone: dict[str, list[list[int]]], model: str, changes: dict[str, object]
) -> None:
    runner = Runner(facts[model], **changes)
    assert runner.run(make_adds()) == alone[model]
    stats = runner.engine.stats()
    if "num_blocks" in changes:
        assert stats.preemptions > 0
    if changes.get("enable_prefix_caching", True):
        assert stats.prefix_hits > 0
        assert runner.run(make_adds()) == alone[model], "with a warm cache"
    runner.close()


def test_reasoning_ends_with_its_budget(alone: dict[str, list[list[int]]]) -> None:
    limited = [t for add, t in zip(make_adds(), alone["llama"], strict=True) if add.sampling.thinking is not None]
    assert any(tokens[4:6] == [8, 5] for tokens in limited)
    assert all(5 in tokens[:6] for tokens in limited)


def test_choices_and_seeds_differ(facts: dict[str, ModelFacts], alone: dict[str, list[list[int]]]) -> None:
    adds = make_adds()
    pairs = zip(adds, alone["llama"], strict=True)
    same = [tokens for add, tokens in pairs if add.prompt_token_ids == adds[9].prompt_token_ids]
    assert len(same) == 3, "choices of one seeded request"
    assert len(set(map(tuple, same))) == 3


def test_resumed_elsewhere_the_tokens_are_the_same(
    facts: dict[str, ModelFacts], alone: dict[str, list[list[int]]]
) -> None:
    import msgspec

    runner = Runner(facts["llama"])
    adds, wanted = make_adds(), alone["llama"]
    cut = [msgspec.structs.replace(a, output_token_ids=w[: len(w) // 2]) for a, w in zip(adds, wanted, strict=True)]
    assert runner.run(cut) == [w[len(w) // 2 :] for w in wanted]
    runner.close()


def test_prompt_logprobs_equal_those_of_generated_tokens(facts: dict[str, ModelFacts]) -> None:
    """The tokens a model generates have the same log-probabilities when read back as a prompt, chunked or not."""
    runner = Runner(facts["llama"], max_num_batched_tokens=11)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, ignore_eos=True)
    add = Add(request_id=0, prompt_token_ids=[5, 6, 7], sampling=sampling, arrival_time=0.0)
    tokens = runner.run([add])[0]
    given = [o.logprobs[0] for o in runner.outputs[0]]
    back = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
    runner.run([Add(request_id=1, prompt_token_ids=[5, 6, 7, *tokens], sampling=back, arrival_time=0.0)])
    read = runner.outputs[1][-1].prompt_logprobs
    assert read[0] is None
    for a, b in zip(given, read[3:], strict=True):
        assert (a.token_id, a.rank, a.top_ids) == (b.token_id, b.rank, b.top_ids)
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-4)
    runner.close()


def test_real_folder_is_needed(tmp_path: Path) -> None:
    from rayllm.errors import ModelError

    with pytest.raises(ModelError, match=str(tmp_path)):
        read_model_facts(str(tmp_path))
