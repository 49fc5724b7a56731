"""Weights out of a GGUF file, dequantized as they are read."""

import numpy as np
import torch
from torch import Tensor

from rayllm.config.gguf_config import ARCHITECTURES
from rayllm.config.gguf_file import BLOCKS, TensorInfo, read_gguf
from rayllm.config.model_facts import ModelFacts
from rayllm.model.checkpoint import Checkpoint
from rayllm.model.dequantize import dequantize
from rayllm.model.spec import WeightNames

GGUF_NAMES = WeightNames(
    layer={
        "blk.{i}.attn_norm": "input_norm",
        "blk.{i}.attn_q": "attention.qkv:q",
        "blk.{i}.attn_k": "attention.qkv:k",
        "blk.{i}.attn_v": "attention.qkv:v",
        "blk.{i}.attn_output": "attention.out",
        "blk.{i}.attn_q_norm": "attention.q_norm",
        "blk.{i}.attn_k_norm": "attention.k_norm",
        "blk.{i}.post_attention_norm": "post_attention_norm",
        "blk.{i}.ffn_norm": "mlp_norm",
        "blk.{i}.ffn_gate": "mlp.gate_up:gate",
        "blk.{i}.ffn_up": "mlp.gate_up:up",
        "blk.{i}.ffn_down": "mlp.down",
        "blk.{i}.post_ffw_norm": "post_mlp_norm",
    },
    top={"token_embd": "embed", "output_norm": "norm", "output": "head"},
    prefixes=("",),
    ignored=("rope_freqs.", "rope_factors_"),
)
"""Tensor names, the same for all architectures. What is ignored here is part of the facts."""

GGUF_FUSED_NAMES = WeightNames(
    layer={
        **{name: place for name, place in GGUF_NAMES.layer.items() if ":" not in place},
        "blk.{i}.attn_qkv": "attention.qkv:q+k+v",
        "blk.{i}.ffn_up": "mlp.gate_up:gate+up",
    },
    top=GGUF_NAMES.top,
    prefixes=GGUF_NAMES.prefixes,
    ignored=GGUF_NAMES.ignored,
)
"""The same where queries, keys and values are one tensor, and gate and up are another."""

# Architectures whose files hold rotated entries in pairs (0, 1), (2, 3)... instead of in halves.
_PAIRED = ("LlamaForCausalLM", "GraniteForCausalLM")
_CHUNK_VALUES = 1 << 22
"""Values dequantized at once; bounds the scratch memory."""


def gguf_names(facts: ModelFacts) -> WeightNames:
    """The names that files of an architecture use."""
    return GGUF_FUSED_NAMES if facts.architecture == "Phi3ForCausalLM" else GGUF_NAMES


def open_gguf(facts: ModelFacts, dtype: torch.dtype) -> Checkpoint:
    """Open the weights of a GGUF file; tensors are read as `dtype`.

    Raises:
        ModelError: the file is damaged.
    """
    assert facts.architecture in {architecture for architecture, _ in ARCHITECTURES.values()}
    file = read_gguf(facts.path, arrays=False)
    # Copy on write, because torch warns of memory that it must not write to.
    data = np.memmap(facts.path, dtype=np.uint8, mode="c")
    tensors = {
        info.name: GgufTensor(file.path, info, data, dtype, _paired_size(info.name, facts))
        for info in file.tensors.values()
    }
    return Checkpoint(tensors, {}, file.path)


def _paired_size(name: str, facts: ModelFacts) -> int:
    """Rows of a head whose entries lie in pairs; 0 where they do not."""
    if facts.architecture not in _PAIRED or (".attn_q." not in name and ".attn_k." not in name):
        return 0
    size: int = facts.config["head_dim"]
    return size


class GgufTensor:
    """One tensor of a GGUF file."""

    def __init__(self, file: str, info: TensorInfo, data: np.ndarray, dtype: torch.dtype, paired: int) -> None:
        self.name, self.file, self.shape, self.nbytes = info.name, file, info.shape, info.nbytes
        self.kind, self._dtype, self._paired = info.type, dtype, paired
        rows = 1 if len(info.shape) == 1 else int(np.prod(info.shape[:-1]))
        self._data_RB = data[info.offset : info.offset + info.nbytes].reshape(rows, -1)

    def read(self, rows: slice, columns: slice | None = None) -> Tensor:
        """See `Stored`. A vector is stored as one row of values, so that `rows` are its values."""
        values = self._rows(slice(0, 1))[0][rows] if len(self.shape) == 1 else self._rows(rows, columns)
        return in_halves(values, self._paired) if self._paired else values

    def read_stored(self, rows: slice, columns: slice | None = None) -> Tensor:
        """See `Stored`."""
        data = torch.from_numpy(self._blocks(rows, columns))
        return in_halves(data, self._paired) if self._paired else data

    def _blocks(self, rows: slice, columns: slice | None) -> np.ndarray:
        """The bytes of whole blocks that hold these columns."""
        if columns is None:
            return self._data_RB[rows]
        _, values, size = BLOCKS[self.kind]
        return self._data_RB[rows, columns.start // values * size : -(-columns.stop // values) * size]

    def _rows(self, rows: slice, columns: slice | None = None) -> Tensor:
        columns = columns or slice(0, self.shape[-1])
        data_RB, first = self._blocks(rows, columns), columns.start % BLOCKS[self.kind][1]
        width = columns.stop - columns.start
        out = torch.empty((len(data_RB), width), dtype=self._dtype)
        step = max(1, _CHUNK_VALUES // width)
        for start in range(0, len(data_RB), step):
            part = dequantize(torch.from_numpy(data_RB[start : start + step]), self.kind)
            out[start : start + step] = part[:, first : first + width]
        return out


def in_halves(values: Tensor, head_size: int) -> Tensor:
    """Rows of whole heads, from pairs (0, 1), (2, 3)... to halves: all first members, then all second ones."""
    assert len(values) % head_size == 0, (values.shape, head_size)
    pairs = values.view(-1, head_size // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
