"""Models for tests: tiny random ones of every family, and the demo model as a Hugging Face folder."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

MODELS = Path(__file__).parent.parent / "models"
SMOLLM2_GGUF = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_FOLDER = MODELS / "SmolLM2-135M-Instruct"

VOCAB = 99
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 6}
_MLA = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
_GROUPED = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


TINY: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_odd_heads": ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}),
    "llama_linear": ("Llama", _rope("linear", factor=4.0)),
    "llama_dynamic": ("Llama", {**_rope("dynamic", factor=2.0), "max_position_embeddings": 32}),
    "llama_llama3": (
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama_yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 7, "head_dim": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3_longrope": (
        "Phi3",
        {
            **_rope("longrope", short_factor=[1.0, 1.5], long_factor=[2.0, 3.5], partial_rotary_factor=0.5),
            "original_max_position_embeddings": 32,
        },
    ),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3Text",
        {
            **_GEMMA,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "deepseek2_lite": ("DeepseekV2", {**_MLA, "q_lora_rank": None, "n_routed_experts": 6}),
    "deepseek2": (
        "DeepseekV2",
        {
            **_MLA,
            **_GROUPED,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.9),
            "topk_method": "group_limited_greedy",
            "q_lora_rank": 28,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "deepseek3": ("DeepseekV3", {**_MLA, **_GROUPED, "q_lora_rank": 28}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "intermediate_size": 36}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True,
            "mlp_only_layers": [1], "head_dim": 16,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False), "head_dim": 16,
            "num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 0.8, "intermediate_size": 36,
            "sliding_window": 6,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "head_dim": 16,
            "moe_intermediate_size": 24, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True,
        },
    ),
}  # fmt: skip
"""Name: transformers' class without its ending, and what its config changes."""

FOREIGN: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 256}),
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "starcoder2": ("Starcoder2", {"sliding_window": 5}),
    "cohere2": ("Cohere2", {"sliding_window": 6, "logit_scale": 0.5}),
    "apertus": ("Apertus", _rope("default")),
    "mamba": ("Mamba", {"state_size": 4}),
    "bloom": ("Bloom", {"n_head": 6, "n_layer": 3}),
    "llama4": ("Llama4Text", {"num_local_experts": 2, "intermediate_size_mlp": 80}),
}
"""The same of classes that only transformers implements."""


def make_tiny(name: str, folder: Path, shard_bytes: str = "50GB", **changes: Any) -> Path:
    """Save the random float32 model `name` of `TINY` or `FOREIGN` to a folder, without a tokenizer, and return that.

    Weights are larger than a training would start with, so that logits are far apart. `changes` go to the config.
    """
    import transformers

    kind, values = {**FOREIGN, **TINY}[name]
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **values, **changes})
    torch.manual_seed(sum(map(ord, name)))
    ending = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind.removesuffix('Text')}{ending}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    return folder


def tiny_chat(folder: Path) -> Path:
    """A tiny random Llama with the demo model's tokenizer and chat template, for tests of what stands around a model.

    Skips the test where the demo model has not been fetched.
    """
    source = smollm2_folder()
    make_tiny("llama", folder, vocab_size=49152, hidden_size=96, max_position_embeddings=8192, head_dim=16)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    return folder


def smollm2_gguf() -> Path:
    """The demo model; skips the test where it has not been fetched."""
    if not SMOLLM2_GGUF.is_file():
        pytest.skip("needs the demo model: run `make model`")
    return SMOLLM2_GGUF


def smollm2_folder() -> Path:
    """The demo model as a bfloat16 Hugging Face folder with its tokenizer, made once and kept; takes some 20 s then.

    Skips the test where the demo model has not been fetched.
    """
    gguf = smollm2_gguf()
    if not (SMOLLM2_FOLDER / "config.json").is_file():
        work = Path(tempfile.mkdtemp(dir=MODELS, prefix="making-"))
        try:
            _convert(gguf, work)
            work.chmod(0o755)
            os.rename(work, SMOLLM2_FOLDER)
        except OSError:
            # Another process was faster.
            if not (SMOLLM2_FOLDER / "config.json").is_file():
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return SMOLLM2_FOLDER


def _convert(gguf: Path, folder: Path) -> None:
    """Let transformers dequantize a GGUF file and save what it makes of it."""
    from transformers import AutoTokenizer

    model = load_gguf_with_transformers(gguf, torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def load_gguf_with_transformers(gguf: Path, dtype: torch.dtype) -> Any:
    """A GGUF model as transformers loads it, dequantized."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    config = GgufConfig(dequantize=True, gguf_file=gguf.name)
    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=dtype, quantization_config=config
    )
