"""From options to an engine's steps over the fake executor, as `rayllm serve` resolves them."""

from collections.abc import Iterable, Sequence

from rayllm.config.engine import EngineConfig
from rayllm.config.files import Files
from rayllm.config.hardware import Hardware
from rayllm.config.model_facts import ModelFacts
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.resolve import Resolved, resolve
from rayllm.config.states import check_states
from rayllm.engine.admission import Admission
from rayllm.engine.engine import build_scheduler
from rayllm.executor.fake import FakeExecutor
from rayllm.kv.blocks import BlockPool
from rayllm.messages.engine import Add
from tests.engine.conftest import VOCAB

FACTS = ModelFacts(
    path="/m", format="hf", architecture="LlamaForCausalLM", vocab_size=VOCAB, max_model_len=512, dtype="float32",
    config={"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3},
    eos_token_ids=(0,),
)  # fmt: skip
MACHINE = Hardware(cpus=4, memory=8 << 30)


def resolved(*arguments: str, facts: ModelFacts = FACTS) -> Resolved:
    values = parse_arguments([facts.path, *arguments], registry())
    check_states(values, registry(), MACHINE)
    return resolve(values, facts, MACHINE, Files())


def config_of(*arguments: str, facts: ModelFacts = FACTS) -> EngineConfig:
    return resolved(*arguments, facts=facts).engine


class Stepper:
    """A scheduler that is asked step by step, and the tokens that each request got."""

    def __init__(self, *arguments: str, blocks: int = 256, facts: ModelFacts = FACTS) -> None:
        config = config_of(*arguments, facts=facts)
        self.pool = BlockPool(blocks)
        self.executor = FakeExecutor(VOCAB, config.block_size, layout=config.kv_layout)
        self.scheduler = build_scheduler(config, self.pool)
        self._admission = Admission(config, frozenset())
        self.tokens: dict[int, list[int]] = {}

    def add(self, *adds: Add) -> None:
        for add in adds:
            self._admission.check(add)
            self.scheduler.add(self._admission.make_request(0, add, 0.0))
            self.tokens[add.request_id] = []

    def step(self) -> dict[int, int]:
        """Tokens computed, by request."""
        step = self.scheduler.plan()
        if step is None:
            return {}
        assert sum(step.plan.counts) <= self.scheduler.limits.max_num_batched_tokens
        for request, output in self.scheduler.commit(step, self.executor.submit(step.plan).result()):
            self.tokens[request.add.request_id] += output.token_ids
        self.pool.check()
        return {r.add.request_id: n for r, n in zip(step.requests, step.plan.counts, strict=True)}

    def run(self, adds: Iterable[Add] = ()) -> Sequence[dict[int, int]]:
        """Every step until nothing is left to do."""
        self.add(*adds)
        steps = []
        while done := self.step():
            steps.append(done)
            assert len(steps) < 10_000
        assert self.pool.stats().held == 0
        assert not self.scheduler.running
        assert not self.scheduler.num_waiting
        return steps
