"""`LLM` with options that change what it samples or reads, on a tiny model without a tokenizer."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rayllm import LLM, SamplingParams
from rayllm.errors import ConfigError, RequestError
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


@pytest.mark.option("enable-prompt-embeds")
def test_embeddings_in_place_of_prompts(model: Path) -> None:
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    ids = [[3, 4, 5], [6, 7]]
    sampling = SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=8, ignore_eos=True)
    options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": "16M", "max_model_len": 128, "dtype": "float32"}
    with LLM(str(model), enable_prompt_embeds=True, **options) as llm:
        told = llm.generate([*ids, *({"prompt_embeds": table[one]} for one in ids)], sampling)
        tokens = [[choice.token_ids for choice in result.outputs] for result in told]
        assert tokens[:2] == tokens[2:]
        for wrong in ("x", table[0], table[:2, :3], table[[1] * 129], table.to_sparse(), table.double()):
            with pytest.raises(RequestError):
                llm.generate([{"prompt_embeds": wrong}])
    with LLM(str(model), **options) as llm, pytest.raises(RequestError, match="--enable-prompt-embeds"):
        llm.generate({"prompt_embeds": table[:2]})


@pytest.mark.parametrize("option", ["port", "ssl_certfile", "otlp_traces_endpoint", "data_parallel_size", "grpc"])
def test_options_of_servers_are_refused(model: Path, option: str) -> None:
    url = "http://127.0.0.1:4318"
    value = {"port": 80, "data_parallel_size": 2, "grpc": True, "otlp_traces_endpoint": url}.get(option, "x")
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')}: has no effect in LLM"):
        LLM(str(model), **{option: value})
