"""The instructions of the compiled kernels one at a time, under the contracts of `Ops`.

A decoder runs as one program and does not come here (see `program.py`). This is for holding each instruction against
its reference, and for single operations beside others that are not compiled: an operation widens its inputs to float32,
runs a program of one instruction, and rounds the result.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayllm_kernels.batch import AttentionBatch
from rayllm_kernels.experts import ExpertWeights
from rayllm_kernels.native.library import Epilogue, Machine, pair
from rayllm_kernels.native.program import Heads, LayerCache, Program, cache_shape

NO_ANGLES = torch.zeros(0)


class NativeOps:
    """The operations as methods."""

    def __init__(self, threads: int = 1, lib: Any = None) -> None:
        """`lib` is a library that `library.load` gave; by default the one that this CPU runs fastest."""
        self._machine = Machine(threads, lib)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False) -> Tensor:
        """See `reference.rms_norm`. Several leading dimensions make it a norm of heads, in place."""
        rows, weight = x_TD.flatten(1), weight_D.float() + plus_one
        if x_TD.ndim == 2:
            program = _program(len(rows), rows, rows.shape[1])
            program.norm(0, 1, weight, eps)
            return self._run(program, len(rows), 1).to(x_TD.dtype)
        program = _program(len(rows), rows)
        program.head_norm(0, 0, rows.shape[1] // len(weight), weight, eps)
        return self._run(program, len(rows), 0).view(x_TD.shape).to(x_TD.dtype)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `reference.add_rms_norm`; the sum is rounded after the norm only, as the residual stream is float32."""
        program = _program(len(x_TD), x_TD, residual_TD, x_TD.shape[1])
        program.add_norm(0, 1, 2, weight_D.float() + plus_one, eps)
        normed = self._run(program, len(x_TD), 2)
        return normed.to(x_TD.dtype), program.buffer(1).to(x_TD.dtype)

    def rotary(self, q_TNH: Tensor, k_TGH: Tensor, cos_sin_TR: Tensor) -> tuple[Tensor, Tensor]:
        """See `reference.rotary`; what is stored beside it goes to a cache of its own."""
        tokens, heads, kv_heads = len(q_TNH), q_TNH.shape[1], k_TGH.shape[1]
        qkv = torch.cat((q_TNH, k_TGH, k_TGH), dim=1).flatten(1)
        program = _program(tokens, qkv)
        cache = LayerCache(-(-tokens // 16), 16, kv_heads, q_TNH.shape[2], torch.float32)
        program.rotate_and_store(0, Heads(heads, 0, cos_sin_TR.shape[1]), cache)
        batch = _batch_of_slots(torch.arange(tokens))
        rotated = self._run(program, tokens, 0, batch, cos_sin_TR.contiguous()).view(tokens, -1, q_TNH.shape[2])
        q, k, _ = rotated.to(q_TNH.dtype).split((heads, kv_heads, kv_heads), dim=1)
        return q, k

    def silu_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See `reference.silu_and_mul`; the epilogue of a product, here with the identity."""
        return self._gated(gate_up_TF, Epilogue.SILU_MUL)

    def gelu_tanh_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See `reference.gelu_tanh_and_mul`; the epilogue of a product, here with the identity."""
        return self._gated(gate_up_TF, Epilogue.GELU_MUL)

    def linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """See `reference.linear`."""
        program = _program(len(x_TD), x_TD, len(weight_ED))
        program.linear(0, 1, self._machine.pack(weight_ED), bias_E)
        return self._run(program, len(x_TD), 1).to(x_TD.dtype)

    def embedding(self, token_ids_T: Tensor, weight_VD: Tensor) -> Tensor:
        """See `reference.embedding`."""
        program = _program(len(token_ids_T), weight_VD.shape[1])
        program.embed(0, self._machine.pack(weight_VD), 1.0)
        ids_T = token_ids_T.long().contiguous()
        batch = _batch_of_slots(torch.arange(len(ids_T)))
        return self._run(program, len(ids_T), 0, batch, token_ids=ids_T).to(weight_VD.dtype)

    def experts(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: ExpertWeights, input_scaled: bool = False
    ) -> Tensor:
        """See `experts.experts`."""
        packed = self._machine.pack_experts(weights, input_scaled)
        return self._machine.experts(x_TD.float().contiguous(), ids_TK, weights_TK, packed).to(x_TD.dtype)

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, kv_heads: int, head_size: int, dtype: torch.dtype = torch.float32
    ) -> tuple[int, ...]:
        """See `attention.kv_cache_shape`; `block_size` is a divisor or a multiple of 16."""
        return cache_shape(num_blocks, block_size, kv_heads, head_size, dtype)

    def write_kv(
        self,
        k_TGH: Tensor,
        v_TGH: Tensor,
        cache: Tensor,
        slot_mapping_T: Tensor,
        scales_2: Tensor | None = None,
    ) -> None:
        """See `attention.write_kv`; a rotation of no entries."""
        program = _program(len(k_TGH), torch.cat((k_TGH, v_TGH), dim=1).flatten(1))
        program.rotate_and_store(0, Heads(0, 0, 0), LayerCache.view_of(cache, k_TGH.shape[2], scales_2))
        self._run(program, len(k_TGH), 0, _batch_of_slots(slot_mapping_T))

    def paged_attention(
        self,
        q_TNH: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks_N: Tensor | None = None,
        scales_2: Tensor | None = None,
    ) -> Tensor:
        """See `attention.paged_attention`."""
        tokens, heads, head_size = q_TNH.shape
        program = _program(tokens, q_TNH.flatten(1), heads * head_size)
        layer = LayerCache.view_of(cache, head_size, scales_2)
        program.attention(0, 1, heads, scale, soft_cap, window, layer, sinks_N)
        return self._run(program, tokens, 1, batch).view(q_TNH.shape).to(q_TNH.dtype)

    def latent_cache_shape(
        self, num_blocks: int, block_size: int, size: int, dtype: torch.dtype = torch.float32
    ) -> tuple[int, ...]:
        """See `attention.latent_cache_shape`; `block_size` is a divisor or a multiple of 16."""
        return cache_shape(num_blocks, block_size, 1, size, dtype, value_in_key=size)

    def write_latent(self, x_TC: Tensor, cache: Tensor, slot_mapping_T: Tensor, scales_2: Tensor | None = None) -> None:
        """See `attention.write_latent`; a rotation of no entries."""
        size = x_TC.shape[1]
        program = _program(len(x_TC), x_TC)
        program.rotate_and_store(0, Heads(0, 0, 0), LayerCache.view_of(cache, size, scales_2, size))
        self._run(program, len(x_TC), 0, _batch_of_slots(slot_mapping_T))

    def latent_attention(
        self,
        q_TNC: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        value_size: int,
        scales_2: Tensor | None = None,
    ) -> Tensor:
        """See `attention.latent_attention`."""
        tokens, heads, size = q_TNC.shape
        program = _program(tokens, q_TNC.flatten(1), heads * value_size)
        layer = LayerCache.view_of(cache, size, scales_2, value_size)
        program.attention(0, 1, heads, scale, None, None, layer)
        return self._run(program, tokens, 1, batch).view(tokens, heads, value_size).to(q_TNC.dtype)

    def _gated(self, gate_up_TF: Tensor, epilogue: Epilogue) -> Tensor:
        gate, up = torch.eye(gate_up_TF.shape[1]).chunk(2)
        out_TF = self._machine.linear(gate_up_TF.float(), self._machine.pack(pair(gate, up)), None, epilogue)
        return out_TF[:, : len(gate)].to(gate_up_TF.dtype)

    def _run(
        self,
        program: Program,
        tokens: int,
        result: int,
        batch: AttentionBatch | None = None,
        angles: Tensor = NO_ANGLES,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        program.finish()
        batch = batch or _batch_of_slots(torch.arange(tokens))
        ids = torch.zeros(tokens, dtype=torch.int64) if token_ids is None else token_ids
        return program.run(self._machine, ids, batch, [angles], result)


def _program(tokens: int, *buffers: Tensor | int) -> Program:
    """A program whose buffers hold some rows, or as many columns of NaN, which it must overwrite."""
    program = Program(tuple(b if isinstance(b, int) else b.shape[1] for b in buffers), tokens)
    for index, content in enumerate(buffers):
        program.buffer(index).copy_(torch.tensor(float("nan")) if isinstance(content, int) else content)
    return program


def _batch_of_slots(slots_T: Tensor) -> AttentionBatch:
    """A batch that only says where keys and values go: one request of all tokens."""
    tokens = np.array([len(slots_T)])
    return AttentionBatch.from_numpy(np.array([0, len(slots_T)]), tokens, np.zeros((1, 1)), slots_T.numpy())
