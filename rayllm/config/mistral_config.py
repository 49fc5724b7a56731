"""Mistral's own format of a config, `params.json`, under Hugging Face's names."""

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
}
_WITHOUT_EFFECT = ("model_type", "causal", "max_batch_size")
_LENGTH = 128_000
"""Context of a model whose parameters state none."""


def config_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """A config as Hugging Face has it.

    Raises:
        ValueError: a parameter asks for a kind of model that is not known.
    """
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        # What the models of this format leave to their tokenizer.
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": None,
        "max_position_embeddings": _LENGTH,
    }
    for name, value in params.items():
        if name in _NAMES:
            config[_NAMES[name]] = value
        elif value and name not in _WITHOUT_EFFECT:
            raise ValueError(f"{name}: {value!r} is not supported")
    return config
