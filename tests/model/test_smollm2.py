"""The demo model gives what transformers makes of the same GGUF file."""

from collections.abc import Callable

import pytest
import torch

from rayllm.model.compiled import KEPT_KINDS, CompiledDecoder
from rayllm.model.decoder import Decoder
from rayllm_kernels.native.library import library
from tests.model.runner import all_logits, greedy_together
from tests.models import load_gguf_with_transformers, smollm2_folder, smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.smollm2]

COUNT = 64
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a short poem about rain.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea, there lived an old woman who " * 6,
    "1, 2, 3, 4,",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen",
    "",
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(smollm2_folder() / "tokenizer.json"))
    return [[1, *tokenizer.encode(text)] for text in PROMPTS]


@pytest.fixture(scope="module")
def ours(load: Callable[..., Decoder]) -> Decoder:
    return load(smollm2_gguf())


def test_greedy_tokens_equal(ours: Decoder, prompts: list[list[int]]) -> None:
    hf = load_gguf_with_transformers(smollm2_gguf(), torch.float32).eval()
    answers = greedy_together(ours, prompts, COUNT, [1000, 5] * (len(prompts) // 2))
    for text, prompt, answer in zip(PROMPTS, prompts, answers, strict=True):
        tokens = [*prompt, *answer]
        with torch.inference_mode():
            logits = hf(torch.tensor([tokens])).logits[0]
        # What it puts first after each token is what its own greedy decoding would have taken.
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer, text
        torch.testing.assert_close(all_logits(ours, tokens), logits, atol=2e-3, rtol=1e-3)


def test_bfloat16_logprobs(ours: Decoder, prompts: list[list[int]], load: Callable[..., Decoder]) -> None:
    """Teacher-forced logprobs of the taken tokens: mean difference from float32 below 0.05."""
    rounded, differences = load(smollm2_gguf(), torch.bfloat16), []
    for prompt, answer in zip(prompts[2:4], greedy_together(ours, prompts[2:4], 24, [1000, 1000]), strict=True):
        tokens = prompt + answer
        exact, near = (all_logits(model, tokens)[:-1].log_softmax(-1) for model in (ours, rounded))
        places = torch.arange(len(prompt) - 1, len(tokens) - 1)
        taken = torch.tensor(tokens)[places + 1]
        differences.append((exact[places, taken] - near[places, taken]).abs())
    assert torch.cat(differences).mean() < 0.05


def test_folder_and_file_agree(prompts: list[list[int]], load: Callable[..., Decoder]) -> None:
    """The folder made from the file holds the file's weights, rounded to bfloat16."""
    folder, file = load(smollm2_folder(), torch.bfloat16), load(smollm2_gguf(), torch.bfloat16)
    for ours, theirs in zip(file.parameters(), folder.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(library() is None, reason="no C++ compiler here")
def test_products_in_integers(prompts: list[list[int]], load: Callable[..., Decoder]) -> None:
    """What bfloat16 makes of the file's quantized weights: nearly the logits and mostly the tokens of float32.

    Weights rounded to bfloat16, as without these kernels, give a mean cosine of 0.9995 and 98% of the tokens.
    """
    exact, near = (
        CompiledDecoder(load(smollm2_gguf(), dtype, keeps=KEPT_KINDS), 2, 128)
        for dtype in (torch.float32, torch.bfloat16)
    )
    wanted, got = (torch.cat([all_logits(model, prompt) for prompt in prompts]) for model in (exact, near))
    assert torch.nn.functional.cosine_similarity(got, wanted, dim=-1).mean() > 0.9998
    assert (got.argmax(-1) == wanted.argmax(-1)).float().mean() >= 0.98
