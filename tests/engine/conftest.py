import threading
from collections.abc import Callable, Iterator

import pytest

from rayllm.config.engine import EngineConfig
from rayllm.config.model_facts import ModelFacts
from rayllm.engine.engine import Engine
from rayllm.executor.fake import FakeExecutor
from rayllm.kv.blocks import BlockPool
from rayllm.messages.engine import Add
from rayllm.messages.ingress import Load, RequestOutput
from rayllm.messages.sampling import SamplingParams

VOCAB = 1000


def make_config(**changes: object) -> EngineConfig:
    facts = ModelFacts(
        path="fake", format="hf", architecture="Fake", config={}, vocab_size=VOCAB, max_model_len=128, dtype="float32",
        eos_token_ids=(0,),
    )  # fmt: skip
    values = {"model": facts, "dtype": "float32", "max_model_len": 128, "block_size": 4, "num_blocks": 64} | changes
    return EngineConfig(**values)


def make_add(request_id: int, prompt: list[int], max_tokens: int | None = 16, **changes: object) -> Add:
    sampling = {"temperature": 0.0, "seed": 1, "max_tokens": max_tokens, "ignore_eos": True}
    adds = {name: changes.pop(name) for name in tuple(changes) if name in Add.__struct_fields__}
    return Add(
        **({"request_id": request_id, "prompt_token_ids": prompt, "output_token_ids": [], "arrival_time": 0.0} | adds),
        sampling=SamplingParams(**(sampling | changes)),
    )  # fmt: skip


class Bench:
    """An engine over the fake executor, and what it delivered."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = FakeExecutor(VOCAB, config.block_size, layout=config.kv_layout)
        self.engine = Engine(config, self.executor, BlockPool(config.num_blocks or 256))
        self.outputs: dict[tuple[int, int], list[RequestOutput]] = {}
        self.loads: list[Load] = []
        self._changed = threading.Condition()
        self.engine.start(self._deliver)

    def _deliver(self, outputs: dict[int, list[RequestOutput]], load: Load) -> None:
        with self._changed:
            self.loads.append(load)
            for client, items in outputs.items():
                for item in items:
                    self.outputs.setdefault((client, item.request_id), []).append(item)
            self._changed.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(done, timeout=20), self.outputs

    def finished(self, *keys: tuple[int, int]) -> bool:
        return all(self.outputs.get(key) and self.outputs[key][-1].finish_reason for key in keys)

    def run(self, *adds: Add, client: int = 0) -> list[list[int]]:
        """Tokens of each request, all sent at once."""
        keys = [(client, add.request_id) for add in adds]
        for add in adds:
            self.engine.add(client, add)
        self.wait(lambda: self.finished(*keys))
        return [self.tokens(key) for key in keys]

    def tokens(self, key: tuple[int, int]) -> list[int]:
        return [token for output in self.outputs[key] for token in output.token_ids]


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(config: EngineConfig | None = None, **changes: object) -> Bench:
        made.append(Bench(config or make_config(**changes)))
        return made[-1]

    yield make
    for one in made:
        if one.engine.dead is None:
            one.wait(lambda one=one: not one.engine._requests)
            while one.engine._sent or one.engine._inbox.open:
                pass
            one.engine.check()
        one.engine.shutdown()
