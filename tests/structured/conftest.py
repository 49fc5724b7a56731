"""A tiny random model with a small byte-level vocabulary: nothing in it inclines to any form of output."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rayllm.config.engine import StructuredSettings
from rayllm.config.model_facts import ModelFacts, read_model_facts
from rayllm.messages.engine import Add
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.structured import StructuredOutputs
from rayllm.render.tokenizer import Tokenizer
from rayllm.structured.grammar import Vocabulary
from tests.models import make_tiny
from tests.render.samples import byte_level_backend, write_folder
from tests.worker.test_engine_on_model import Runner

VOCAB = 411
"""More than the tokenizer has, and no multiple of 32."""
END = 0
PROMPT = [20, 30, 40, 50, 60, 70]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured")
    make_tiny("llama", folder, vocab_size=VOCAB, eos_token_id=END, max_position_embeddings=512)
    return write_folder(folder, byte_level_backend(), {"eos_token": "<|end|>"})


@pytest.fixture(scope="session")
def facts(folder: Path) -> ModelFacts:
    return read_model_facts(str(folder))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(str(folder))


@pytest.fixture(scope="session")
def vocabulary(folder: Path, facts: ModelFacts) -> Vocabulary:
    return Vocabulary.load(str(folder), facts)


class Forms(Runner):
    """An engine, and the texts that it gives."""

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer, changes: dict[str, object]) -> None:
        settings = StructuredSettings(**changes.pop("structured", {}))
        values = {"max_model_len": 400, "num_blocks": 256, "tokenizer": facts.path, "structured": settings} | changes
        super().__init__(facts, **values)
        self._tokenizer = tokenizer

    def texts(self, *asked: StructuredOutputs, **sampling: object) -> list[str]:
        """One output for each form, at the highest temperature unless told otherwise."""
        return [self.text(ids) for ids in self.run([add(i, one, **sampling) for i, one in enumerate(asked)])]

    def text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, continues=True)


def add(request_id: int, asked: StructuredOutputs | None, prompt: list[int] = PROMPT, **sampling: object) -> Add:
    output = sampling.pop("output", [])
    params = {"temperature": 2.0, "seed": request_id, "max_tokens": 300, "structured_outputs": asked} | sampling
    return Add(
        request_id=request_id, prompt_token_ids=prompt, output_token_ids=output, sampling=SamplingParams(**params),
        arrival_time=0.0,
    )  # fmt: skip


@pytest.fixture
def start(facts: ModelFacts, tokenizer: Tokenizer) -> Iterator[Callable[..., Forms]]:
    made: list[Forms] = []

    def make(**changes: object) -> Forms:
        made.append(Forms(facts, tokenizer, changes))
        return made[-1]

    yield make
    for one in made:
        one.close()
