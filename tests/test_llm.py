"""`LLM` on the demo model."""

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rayllm import LLM, SamplingParams
from rayllm.errors import ConfigError, ContextTooLong, ModelError, RequestError
from rayllm.llm import Result
from tests.models import smollm2_folder, smollm2_gguf
from tests.prompts import PROMPTS

pytestmark = pytest.mark.smollm2
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(smollm2_gguf()), dtype="float32", max_model_len=1024, kv_cache_memory_bytes="256M") as one:
        yield one


def ask(llm: LLM, prompt: str = "The capital of France is", **sampling: object) -> object:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | sampling)
    return llm.generate(prompt, params)[0].outputs[0]


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    one, two = llm.chat([messages, messages], GREEDY)
    assert one.outputs[0].text == two.outputs[0].text == "The capital of France is Paris."
    assert one.outputs[0].finish_reason == "stop"
    assert one.outputs[0].stop_reason is None


def test_stop_strings_and_tokens(llm: LLM) -> None:
    whole = ask(llm)
    stop = whole.text[8:11]
    cut = ask(llm, stop=(stop,))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert ask(llm, stop=(stop,), include_stop_str_in_output=True).text.endswith(stop)
    token = whole.token_ids[3]
    ended = ask(llm, stop_token_ids=(token,))
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert ended.stop_reason == token
    late = ask(llm, stop=(whole.text[:2],), min_tokens=5)
    assert len(late.token_ids) > 5


def test_choices_seeds_and_logprobs(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.0, n=3, seed=3, max_tokens=12, logprobs=2, prompt_logprobs=0)
    first, again = llm.generate(["A story:", "A story:"], sampling)
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3
    assert [e.token_id for e in first.outputs[0].logprobs] == first.outputs[0].token_ids
    assert [e and e.token_id for e in first.prompt_logprobs] == [None, *first.prompt_token_ids[1:]]


@pytest.mark.option("worker-extension-cls")
def test_methods_of_workers_can_be_called(llm: LLM) -> None:
    assert llm.collective_rpc("kv_bytes_per_block") == [llm._engine._executor.kv_bytes_per_block()]


def test_bad_words_never_appear(llm: LLM) -> None:
    assert "Paris" in ask(llm).text
    assert "Paris" not in ask(llm, bad_words=("Paris",)).text


def test_every_form_of_a_prompt(llm: LLM) -> None:
    text = "The capital of France is"
    ids = llm.tokenizer.encode(text)
    forms = (text, ids, np.array(ids), {"prompt": text}, {"prompt_token_ids": ids})
    together = llm.generate(forms, GREEDY)
    assert len({tuple(result.outputs[0].token_ids) for result in together}) == 1
    for form in forms:
        assert llm.generate(form, GREEDY) == together[:1]
    for wrong in ({"prompts": text}, {}, {"prompt": text, "prompt_token_ids": ids}, {"prompt": 3}, ["a", 1], [None]):
        with pytest.raises(RequestError, match="prompt"):
            llm.generate([wrong], GREEDY)


def test_wrong_requests_leave_the_engine_well(llm: LLM) -> None:
    for params, error in (
        ({"temperature": -1.0}, RequestError),
        ({"max_tokens": 5000}, ContextTooLong),
        ({"logit_bias": {10**6: 1.0}}, RequestError),
        ({"extra_args": {"nothing": 1}}, RequestError),
    ):
        with pytest.raises(error):
            ask(llm, **params)
    with pytest.raises(RequestError):
        llm.generate([[1, 2], [99999999]], GREEDY)
    with pytest.raises(ValueError, match="2 sampling"):
        llm.generate(["a"], [GREEDY, GREEDY])
    assert "Paris" in ask(llm).text


def test_wrong_starts() -> None:
    with pytest.raises(ModelError, match="/no/such/model"):
        LLM("/no/such/model")
    with pytest.raises(ConfigError, match="max-model-len"):
        LLM(str(smollm2_gguf()), max_model_len=10**6)
    with pytest.raises(ConfigError, match="num-gpu-blocks-override"):
        LLM(str(smollm2_gguf()), max_model_len=1024, num_gpu_blocks_override=3)
    with pytest.raises(ConfigError, match="logits-processors"):
        LLM(str(smollm2_gguf()), logits_processors=["no.such:Thing"])


def test_importing_loads_neither_torch_nor_ray() -> None:
    code = "import rayllm, sys; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def exact() -> list[Result]:
    """40 prompts x 64 tokens in float32, all of them in one batch."""
    with LLM(str(smollm2_folder()), dtype="float32", max_model_len=512, max_num_batched_tokens=100) as llm:
        return llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0))


@pytest.mark.slow
def test_greedy_tokens_equal_those_of_transformers(exact: list[Result]) -> None:
    """Each of our tokens is what transformers puts first after those before it: so its greedy decoding gives them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).eval()
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # our worker left it one
    for result in exact:
        prompt, tokens = result.prompt_token_ids, result.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]]), logits_to_keep=len(tokens) + 1).logits[0, :-1]
        assert len(tokens) == 64
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.slow
def test_bfloat16_is_close_to_float32(exact: list[Result]) -> None:
    """Teacher-forced log-probabilities of the tokens that float32 takes."""
    results = exact[:16]
    forced = [[*r.prompt_token_ids, *r.outputs[0].token_ids] for r in results]
    with LLM(str(smollm2_folder()), dtype="bfloat16", max_model_len=512) as llm:
        read = llm.generate(forced, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0))
    apart = [
        abs(entry.logprob - other.logprob)
        for result, back in zip(results, read, strict=True)
        for entry, other in zip(
            result.outputs[0].logprobs, back.prompt_logprobs[len(result.prompt_token_ids) :], strict=True
        )
    ]
    assert sum(apart) / len(apart) < 0.05
