"""Models that transformers' code runs over our cache: the same logits as by transformers alone, and the same bits in
whatever company; what cannot be run so is refused, and says why."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rayllm import LLM, SamplingParams
from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.errors import ConfigError, ModelError
from rayllm.model.precheck import check_model
from rayllm.model.sharded_state import main as write_sharded_state
from rayllm.model.transformers_decoder import TransformersDecoder
from rayllm.worker.worker import build_model
from rayllm_kernels.native.library import library
from tests.model.gguf_writer import write_gguf
from tests.model.runner import all_logits, greedy
from tests.models import make_tiny

pytestmark = pytest.mark.slow

Tiny = Callable[[str], Path]
PROMPT = [1, 7, 30, 4, 55, 8, 8, 90, 3, 12, 41]
ONE_GROUP = ("--disable-hybrid-kv-cache-manager",)
"""The runner of these tests knows one table of blocks."""
KERNELS = [
    "torch",
    pytest.param("auto", marks=pytest.mark.skipif(library() is None, reason="no C++ compiler here")),
]


def started(path: Path | str, *arguments: str) -> Any:
    """The model that an engine makes of a command line, in float32."""
    flags = [str(path), "--dtype", "float32", "--no-use-tqdm-on-load", *ONE_GROUP, *arguments]
    engine = load(parse_arguments(flags, registry())).engine
    check_model(engine)
    return build_model(engine, torch.device("cpu"))


@pytest.mark.option("model-impl")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "opt", "starcoder2", "cohere2", "apertus", "mixtral", "gpt_oss"])
def test_classes_that_only_transformers_has(
    tiny: Tiny, reference: Callable[[Path], Any], name: str, kernels: str
) -> None:
    """Positions learned and rotated, windows, scaled logits; experts and sinks, where it is asked for."""
    model = started(tiny(name), "--attention-backend", kernels, "--model-impl", "transformers")
    assert isinstance(model, TransformersDecoder)
    theirs = reference(tiny(name))
    with torch.inference_mode():
        wanted = theirs(torch.tensor([PROMPT])).logits[0]
    whole, cut = all_logits(model, PROMPT), all_logits(model, PROMPT, chunk=3)
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cut, wanted, rtol=1e-4, atol=1e-4)
    if kernels == "auto" and name not in ("mixtral", "gpt_oss"):  # experts are products of torch's
        assert torch.equal(whole, cut)
    answer = theirs.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64), max_new_tokens=8,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert greedy(model, PROMPT, 8, chunk=4) == answer[0, len(PROMPT) :].tolist()


@pytest.mark.option("model-impl")
def test_the_same_text_by_both(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name in ("llama", "gemma2"):
        answers = [greedy(started(tiny(name), "--model-impl", impl), PROMPT, 12) for impl in ("vllm", "transformers")]
        assert answers[0] == answers[1]
    assert "model implementation: rayllm's own, for LlamaForCausalLM" in caplog.text
    assert "model implementation: LlamaForCausalLM (transformers)" in caplog.text


@pytest.mark.option("model-impl")
def test_implementations_that_do_not_know_a_model(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model-impl: .*does not know GPTNeoXForCausalLM"):
        started(tiny("gpt_neox"), "--model-impl", "vllm")
    with pytest.raises(ConfigError, match="--model-impl: TerraTorch"):
        started(tiny("llama"), "--model-impl", "terratorch")
    file = write_gguf(tiny("llama"), tmp_path / "m.gguf", "llama")
    with pytest.raises(ConfigError, match=r"--model-impl: .*GGUF"):
        started(file, "--model-impl", "transformers")
    for option in ("--enable-mfu-metrics", "--disable-sliding-window", "--no-disable-cascade-attn"):
        with pytest.raises(ConfigError, match=option):
            started(tiny("starcoder2"), option)
    with pytest.raises(ConfigError, match="--kv-cache-dtype"):
        started(tiny("starcoder2"), "--kv-cache-dtype", "fp8")
    with pytest.raises(ConfigError, match="--no-disable-hybrid-kv-cache-manager"):
        started(tiny("starcoder2"), "--no-disable-hybrid-kv-cache-manager")
    assert write_sharded_state([str(tiny("starcoder2")), str(tmp_path / "out")]) == 1
    with pytest.raises(ConfigError, match="--load-format"):
        started(tiny("starcoder2"), "--load-format", "sharded_state")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mamba", "keeps a state"),
        ("bloom", "does not let attention be exchanged"),
        ("llama4", "chunked_attention"),
    ],
)
def test_what_cannot_be_run_over_a_paged_cache(tiny: Tiny, name: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        started(tiny(name))


def test_ropes_that_grow_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match="angles depend on others"):
        started(tiny("phi3_longrope"), "--model-impl", "transformers")


OWN_CODE = """
from transformers import Starcoder2ForCausalLM

from .configuration_own import OwnConfig


class Own(Starcoder2ForCausalLM):
    config_class = OwnConfig
"""
OWN_CONFIG = """
from transformers import Starcoder2Config


class OwnConfig(Starcoder2Config):
    model_type = "own"
"""


@pytest.mark.option("trust-remote-code", "model-impl", "code-revision")
def test_code_of_the_models_own(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    caplog.set_level(logging.INFO)
    own = tmp_path / "own"
    shutil.copytree(tiny("starcoder2"), own)
    config = json.loads((own / "config.json").read_text())
    named = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    changes = {"model_type": "own", "architectures": ["Own"], "auto_map": named}
    (own / "config.json").write_text(json.dumps(config | changes))
    (own / "modeling_own.py").write_text(OWN_CODE)
    (own / "configuration_own.py").write_text(OWN_CONFIG)
    for code in (named, {"AutoModelForCausalLM": "modeling_own.Own"}):
        (own / "config.json").write_text(json.dumps(config | changes | {"auto_map": code}))
        with pytest.raises(ConfigError, match=r"--trust-remote-code: .* give the option if you trust it"):
            started(own)
    (own / "config.json").write_text(json.dumps(config | changes))
    model = started(own, "--trust-remote-code")
    assert torch.equal(all_logits(model, PROMPT), all_logits(started(tiny("starcoder2")), PROMPT))
    assert f"model implementation: Own (transformers, with code of {own})" in caplog.text
    with pytest.raises(ConfigError, match=r"--model-impl: .*does not know Own"):
        started(own, "--trust-remote-code", "--model-impl", "vllm")
    for arguments, why in (
        ((own, "--trust-remote-code"), "is no name on the hub"),
        ((own,), "not run; give --trust-remote-code"),
        ((tiny("starcoder2"), "--trust-remote-code"), "names no code of its own"),
    ):
        with pytest.raises(ConfigError, match=f"--code-revision: .*{why}"):
            started(*arguments, "--code-revision", "v2")


def test_tensors_that_lack(tiny: Tiny, tmp_path: Path) -> None:
    made = make_tiny("gpt_neox", tmp_path / "m", num_hidden_layers=1)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ModelError, match=r"tensor gpt_neox\.layers\.1.*: missing"):
        started(made)


def test_options_about_weights_and_config_hold(tiny: Tiny, tmp_path: Path) -> None:
    """Files of every kind are read, overrides change the config, dummy weights follow the seed, 16 bits are near 32."""
    plain = all_logits(started(tiny("gpt_neox")), PROMPT)
    shutil.copy(tiny("gpt_neox") / "config.json", tmp_path)
    torch.save(load_file(tiny("gpt_neox") / "model.safetensors"), tmp_path / "pytorch_model.bin")
    for folder, *flags in (
        (tmp_path,),
        (tiny("gpt_neox"), "--safetensors-load-strategy", "eager"),
        (tiny("gpt_neox"), "--load-format", "runai_streamer"),
    ):
        assert torch.equal(all_logits(started(folder, *flags), PROMPT), plain)
    one = started(tiny("gpt_neox"), "--hf-overrides.num_hidden_layers", "1")
    assert len(one.cache_specs()) == 1
    drawn = [started(tiny("gpt_neox"), "--load-format", "dummy", "--seed", seed) for seed in "112"]
    logits = [all_logits(model, PROMPT) for model in drawn]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    near = all_logits(started(tiny("gpt_neox"), "--dtype", "bfloat16"), PROMPT).softmax(-1)
    torch.testing.assert_close(near, plain.softmax(-1), rtol=0, atol=0.1)


@pytest.mark.skipif(library() is None, reason="no C++ compiler here; torch's own products depend on the batch")
@pytest.mark.parametrize("name", ["gpt_neox", "cohere2"])
def test_answers_in_company(tiny: Tiny, name: str) -> None:
    """The same bits alone and among others, in chunks, and after a prefix that is cached."""
    prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 90 for j in range(length)]} for i, length in enumerate(
        (1, 3, 17, 40, 90, 33)
    )]  # fmt: skip
    stem = prompts[4]["prompt_token_ids"]
    prompts.append({"prompt_token_ids": [*stem[:60], 5, 6]})
    ask = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "num_gpu_blocks_override": 80,
    }

    def answers(results: Any) -> list[Any]:
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in results]

    with LLM(str(tiny(name)), enable_prefix_caching=False, **options) as llm:
        alone = [answers(llm.generate(prompt, ask))[0] for prompt in prompts]
    with LLM(str(tiny(name)), max_num_batched_tokens=24, **options) as llm:
        assert answers(llm.generate(prompts, ask)) == alone
        plain = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        again = llm.generate(prompts, plain)
        assert [one.outputs[0].token_ids for one in again] == [tokens for tokens, _, _ in alone]
        assert again[4].cached_tokens > 0
