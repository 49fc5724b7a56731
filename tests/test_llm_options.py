"""`LLM` with options that change what it samples or reads, on a tiny model without a tokenizer."""

from pathlib import Path

import pytest

from rayllm import LLM, SamplingParams
from rayllm.errors import RequestError
from tests.models import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def sampled(model: Path, seed: int) -> list[int]:
    with LLM(str(model), skip_tokenizer_init=True, kv_cache_memory_bytes="16M", max_model_len=128, seed=seed) as llm:
        return llm.generate([[1, 2, 3]], SamplingParams(max_tokens=32, ignore_eos=True))[0].outputs[0].token_ids


@pytest.mark.option("seed")
def test_the_seed_decides_what_is_sampled(model: Path) -> None:
    assert sampled(model, 7) == sampled(model, 7) != sampled(model, 8)


@pytest.mark.option("skip-tokenizer-init")
def test_ids_in_and_out(model: Path) -> None:
    with LLM(str(model), skip_tokenizer_init=True, kv_cache_memory_bytes="16M", max_model_len=128) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs
        assert len(output.token_ids) == 4
        assert output.text == ""
        with pytest.raises(RequestError, match="send token ids"):
            llm.generate("text")
        with pytest.raises(RequestError, match="stop needs text"):
            llm.generate([[1]], SamplingParams(stop=("x",)))
