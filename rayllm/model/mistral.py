"""Mistral's own checkpoints, `consolidated*.safetensors`: their names, and the order of their rotated entries."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from rayllm.config.model_facts import ModelFacts
from rayllm.model.checkpoint import Checkpoint
from rayllm.model.gguf import in_halves
from rayllm.model.spec import WeightNames

MISTRAL_NAMES = WeightNames(
    layer={
        "layers.{i}.attention.wq": "attention.qkv:q",
        "layers.{i}.attention.wk": "attention.qkv:k",
        "layers.{i}.attention.wv": "attention.qkv:v",
        "layers.{i}.attention.wo": "attention.out",
        "layers.{i}.feed_forward.w1": "mlp.gate_up:gate",
        "layers.{i}.feed_forward.w3": "mlp.gate_up:up",
        "layers.{i}.feed_forward.w2": "mlp.down",
        "layers.{i}.attention_norm": "input_norm",
        "layers.{i}.ffn_norm": "mlp_norm",
    },
    top={"tok_embeddings": "embed", "norm": "norm", "output": "head"},
    prefixes=("",),
)
_PAIRED = (".attention.wq.weight", ".attention.wk.weight")


def in_our_order(checkpoint: Checkpoint, facts: ModelFacts) -> Checkpoint:
    """The checkpoint with queries and keys in halves, where it has their entries in pairs (0, 1), (2, 3)..."""
    config = facts.config
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    tensors: Mapping[str, Any] = {
        name: _Halved(stored, size) if name.endswith(_PAIRED) else stored for name, stored in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


class _Halved:
    """A stored tensor whose heads are read with their entries in halves."""

    def __init__(self, stored: Any, head_size: int) -> None:
        self._stored, self._head_size = stored, head_size
        self.name, self.file, self.shape = stored.name, stored.file, stored.shape
        self.kind, self.nbytes = stored.kind, stored.nbytes

    def read_stored(self, rows: slice, columns: slice | None = None) -> Tensor:
        raise AssertionError(f"{self.name} is not quantized")

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        """See `Stored`; `rows` are those of whole heads."""
        return in_halves(self._stored.read(rows, columns), self._head_size)
