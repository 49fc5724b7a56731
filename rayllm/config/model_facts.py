"""What a model's files say about it, read without torch: sizes, limits, end tokens, generation defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Plain facts about one model.

    `config` holds values under Hugging Face's names (`hidden_size`, `num_attention_heads`, ...), whatever the file
    format; nested text configs are flattened.
    """

    path: str
    """A model folder, or one GGUF file."""
    format: str
    """`hf` or `gguf`."""
    architecture: str
    """As Hugging Face names it, such as `LlamaForCausalLM`."""
    config: Mapping[str, Any]
    vocab_size: int
    max_model_len: int
    """Longest context in tokens that the position encoding allows."""
    dtype: str
    """`float32`, `bfloat16` or `float16`, as stored."""
    eos_token_ids: tuple[int, ...] = ()
    """Every end token, of the model's config and of its generation config."""
    bos_token_id: int | None = None
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the model's generation config sets, under our names."""


def read_model_facts(path: str) -> ModelFacts:
    """Read the facts of the model at `path`, a Hugging Face folder or a GGUF file.

    Raises:
        ModelError: nothing is there, or a file is damaged; names the file.
    """
    raise NotImplementedError
