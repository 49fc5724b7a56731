"""Every family gives what transformers gives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayllm.model.decoder import Decoder
from tests.model.runner import Runner, Sequence, all_logits, greedy
from tests.models import TINY, VOCAB, make_tiny

pytestmark = pytest.mark.slow

Load = Callable[..., Decoder]


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def hf_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def hf_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(hf_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


# Contexts long enough to leave every window and short enough for what rope was trained on.
LENGTHS = {"llama_dynamic": 20, "phi3_longrope": 20}


@pytest.mark.parametrize("name", TINY)
def test_equals_transformers(name: str, tiny: Callable[[str], Path], load: Load, reference: Callable[..., Any]) -> None:
    limit = {"max_model_len": 32} if name in LENGTHS else {}
    model, hf = load(tiny(name), **limit), reference(tiny(name))
    prompt = tokens_of(1, LENGTHS.get(name, 45))
    expected = hf_logits(hf, prompt)
    assert expected.std() > 0.1, "logits too close together to tell anything"
    for chunk in (1000, 7):
        torch.testing.assert_close(all_logits(model, prompt, chunk), expected, atol=2e-4, rtol=1e-4)
    wanted = hf_greedy(hf, prompt[:17], 12)
    assert greedy(model, prompt[:17], 12) == wanted
    assert greedy(model, prompt[:17], 12, chunk=5) == wanted


@pytest.mark.parametrize(("name", "length"), [("llama_dynamic", 60), ("phi3_longrope", 60)])
def test_stretched_context(
    name: str, length: int, tiny: Callable[[str], Path], load: Load, reference: Callable[..., Any]
) -> None:
    """Served for contexts longer than trained, a sequence of the longest one is as transformers has it."""
    model, prompt = load(tiny(name), max_model_len=length), tokens_of(2, length)
    torch.testing.assert_close(
        all_logits(model, prompt, 11), hf_logits(reference(tiny(name)), prompt), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral_window", "olmo2", "phi3"])
def test_batch_does_not_matter(name: str, tiny: Callable[[str], Path], load: Load) -> None:
    """Decoding, chunks of prompts and whole prompts in one step give what each gives alone."""
    model = load(tiny(name))
    lengths = [1, 3, 9, 20, 33, 47, 5, 70]
    sequences = [Sequence(tokens_of(i, length)) for i, length in enumerate(lengths)]
    alone = [all_logits(model, sequence.tokens) for sequence in sequences]
    runner, chunks = Runner(model, len(lengths), max(lengths)), [1, 3, 1, 4, 13, 1, 2, 40]
    while True:
        work = [
            (row, sequence, min(chunks[row], len(sequence.tokens) - sequence.computed))
            for row, sequence in enumerate(sequences)
            if sequence.computed < len(sequence.tokens)
        ]
        if not work:
            break
        runner.step(work)
    for sequence, expected in zip(sequences, alone, strict=True):
        torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2"])
def test_bfloat16_is_near(name: str, tiny: Callable[[str], Path], load: Load) -> None:
    prompt = tokens_of(3, 40)
    exact, rounded = (
        all_logits(load(tiny(name), dtype), prompt).log_softmax(-1) for dtype in (torch.float32, torch.bfloat16)
    )
    taken = torch.tensor(prompt[1:])
    error = (exact[:-1] - rounded[:-1])[range(len(taken)), taken].abs().mean()
    assert error < 0.1 * exact.std()


def test_float16_runs(tiny: Callable[[str], Path], load: Load) -> None:
    assert all_logits(load(tiny("llama"), torch.float16), tokens_of(4, 12)).isfinite().all()


def test_text_part_of_multimodal_gemma(tmp_path: Path, load: Load) -> None:
    """A checkpoint with a vision tower serves as the language model in it does."""
    from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

    text = AutoModelForCausalLM.from_pretrained(make_tiny("gemma3", tmp_path / "text"), dtype=torch.float32)
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=text.config, vision_config=vision, mm_tokens_per_image=4)
    both = Gemma3ForConditionalGeneration(config)
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.save_pretrained(tmp_path / "both")
    prompt = tokens_of(5, 20)
    torch.testing.assert_close(
        all_logits(load(tmp_path / "both"), prompt), hf_logits(text, prompt), atol=2e-4, rtol=1e-4
    )


def test_cache_specs(tiny: Callable[[str], Path], load: Load) -> None:
    specs = load(tiny("gemma2")).cache_specs()
    assert [(spec.kind, spec.window) for spec in specs] == [("sliding", 6), ("full", None), ("sliding", 6)]
    assert {spec.bytes_per_token for spec in specs} == {2 * 2 * 16 * 4}
    caches = load(tiny("gemma2")).new_caches(7, 4)
    assert {cache.numel() * cache.itemsize for cache in caches} == {7 * 4 * specs[0].bytes_per_token}
