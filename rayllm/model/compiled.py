"""A decoder on a CPU as a program for the compiled kernels: one call a step instead of dozens a layer.

Activations are float32 throughout; weights and cache keep their dtype. Tokens come out the same bits whatever else is
in the step, because every sum in the kernels has a fixed order.
"""

import torch
from torch import Tensor

from rayllm.errors import ConfigError
from rayllm.model.decoder import Decoder, DecoderLayer
from rayllm.model.layers import ColumnLinear, Norm, RowLinear, SplitNorm, VocabTable
from rayllm.model.spec import Activation, CacheSpec
from rayllm_kernels import AttentionBatch
from rayllm_kernels.native.library import Epilogue, Machine, Packed, pair
from rayllm_kernels.native.program import LayerCache, Program, cache_bytes, fits

RESIDUAL, NORMED, QKV, ATTENDED, BRANCH, INNER = range(6)
"""Buffers of a program."""


class CompiledDecoder:
    """Stands in for a `Decoder`, whose weights it takes over: they are packed, and the decoder is empty afterwards."""

    def __init__(self, decoder: Decoder, threads: int, max_tokens: int) -> None:
        """`max_tokens` is the most in a step."""
        assert decoder.place.group.size == 1
        self.spec = decoder.spec
        self._place, self._ropes, self._cache_specs = decoder.place, decoder.ropes, decoder.cache_specs()
        self._max_tokens = max_tokens
        self._machine = Machine(threads)
        self._embedding_scale = float(decoder.embedding_scale)
        self._embed = _take(decoder.embed, self._machine)
        self._head = self._embed if decoder.head is decoder.embed else _take(decoder.head, self._machine)
        self._norm_weight = _norm_weight(decoder.norm)
        self._layers = [_Layer(layer, decoder.spec.activation, self._machine) for layer in decoder.layers]
        self._program: Program | None = None
        self._caches: object = None

    def cache_specs(self) -> list[CacheSpec]:
        """What each layer caches."""
        return self._cache_specs

    def cache_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        return sum(cache_bytes(block_size, s.kv_heads, s.head_size, self._place.dtype) for s in self._cache_specs)

    def new_caches(self, num_blocks: int, block_size: int) -> list[LayerCache]:
        """Empty caches, one for each layer, to be handed to every call.

        Raises:
            ConfigError: the kernels cannot use blocks of this size.
        """
        if not fits(block_size):
            raise ConfigError("--block-size", f"{block_size} is no divisor and no multiple of 16", "choose 16 or 32")
        return [
            LayerCache(num_blocks, block_size, spec.kv_heads, spec.head_size, self._place.dtype)
            for spec in self._cache_specs
        ]

    def __call__(
        self, token_ids_T: Tensor, positions_T: Tensor, batch: AttentionBatch, caches: list[LayerCache]
    ) -> Tensor:
        """Run one step: (T, D) float32, normalised; a view that the next step overwrites."""
        if self._caches is not caches:
            self._program, self._caches = self._build(caches), caches
        assert self._program is not None
        angles = [rope(positions_T).contiguous() for rope in self._ropes]
        return self._program.run(self._machine, token_ids_T, batch, angles, NORMED)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits over the whole vocabulary, (R, V) float32, with the model's own scale and cap."""
        logits_RV = self._machine.linear(hidden_RD.contiguous(), self._head)
        if self.spec.logits_scale != 1.0:
            logits_RV = logits_RV / self.spec.logits_scale
        if self.spec.final_soft_cap is not None:
            logits_RV = torch.tanh(logits_RV / self.spec.final_soft_cap) * self.spec.final_soft_cap
        return logits_RV

    def argmax(self, logits_RV: Tensor) -> Tensor:
        """The first of the largest logits of each row, (R) int64."""
        return self._machine.argmax(logits_RV)

    def _build(self, caches: list[LayerCache]) -> Program:
        spec = self.spec
        query = spec.num_heads * spec.head_size
        key = spec.num_kv_heads * spec.head_size
        inner = -(-spec.intermediate_size // 16) * 16
        width = spec.hidden_size
        program = Program((width, width, query + 2 * key, query, width, inner), self._max_tokens)
        program.embed(RESIDUAL, self._embed, self._embedding_scale)
        first = True
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            self._branch_in(program, layer.input_norm, first)
            first = False
            self._attention(program, layer, index, cache)
            self._branch_out(program, layer.post_attention_norm)
            self._branch_in(program, layer.mlp_norm, first)
            source = NORMED if layer.mlp_norm is not None else RESIDUAL
            program.linear(source, INNER, layer.gate_up, layer.gate_up_bias, layer.epilogue)
            program.linear(INNER, BRANCH, layer.down, layer.down_bias)
            self._branch_out(program, layer.post_mlp_norm)
        program.add_norm(BRANCH, RESIDUAL, NORMED, self._norm_weight, spec.norm_eps, spec.residual_scale)
        program.finish()
        return program

    def _branch_in(self, program: Program, norm: Tensor | None, first: bool) -> None:
        """Add what the last branch gave, and norm what this one takes."""
        eps, scale = self.spec.norm_eps, self.spec.residual_scale
        if first:
            if norm is not None:
                program.norm(RESIDUAL, NORMED, norm, eps)
        elif norm is not None:
            program.add_norm(BRANCH, RESIDUAL, NORMED, norm, eps, scale)
        else:
            program.add(BRANCH, RESIDUAL, scale)

    def _branch_out(self, program: Program, norm: Tensor | None) -> None:
        if norm is not None:
            program.norm(BRANCH, BRANCH, norm, self.spec.norm_eps)

    def _attention(self, program: Program, layer: "_Layer", index: int, cache: LayerCache) -> None:
        spec = self.spec
        query = spec.num_heads * spec.head_size
        program.linear(NORMED if layer.input_norm is not None else RESIDUAL, QKV, layer.qkv, layer.qkv_bias)
        if layer.q_norm is not None and layer.k_norm is not None:
            if spec.qk_norm == "head":
                program.head_norm(QKV, 0, spec.num_heads, layer.q_norm, spec.norm_eps)
                program.head_norm(QKV, query, spec.num_kv_heads, layer.k_norm, spec.norm_eps)
            else:
                program.norm(QKV, QKV, layer.q_norm, spec.norm_eps)
                program.norm(QKV, QKV, layer.k_norm, spec.norm_eps, offset=query)
        rope = spec.layer_rope[index]
        program.rotate_and_store(QKV, rope, spec.ropes[rope].size, spec.num_heads, cache)
        program.attention(
            QKV, ATTENDED, spec.num_heads, spec.query_scale, spec.attention_soft_cap, spec.windows[index], cache
        )
        program.linear(ATTENDED, BRANCH, layer.out, layer.out_bias)


class _Layer:
    """Packed weights of one layer."""

    def __init__(self, layer: DecoderLayer, activation: Activation, machine: Machine) -> None:
        attention, mlp = layer.attention, layer.mlp
        self.input_norm = _norm_weight(layer.input_norm)
        self.post_attention_norm = _norm_weight(layer.post_attention_norm)
        self.mlp_norm = _norm_weight(layer.mlp_norm)
        self.post_mlp_norm = _norm_weight(layer.post_mlp_norm)
        self.q_norm, self.k_norm = _norm_weight(attention.q_norm), _norm_weight(attention.k_norm)
        self.qkv, self.qkv_bias = _take(attention.qkv, machine), attention.qkv.bias
        self.out, self.out_bias = _take(attention.out, machine), attention.out.bias
        self.down, self.down_bias = _take(mlp.down, machine), mlp.down.bias
        half = mlp.gate_up.sizes[0]
        weight, bias = mlp.gate_up.weight, mlp.gate_up.bias
        self.gate_up = machine.pack(pair(weight[:half], weight[half:]))
        mlp.gate_up.weight.data = weight.new_empty(0)
        self.gate_up_bias = None if bias is None else pair(bias[:half, None], bias[half:, None])[:, 0]
        self.epilogue = Epilogue.SILU_MUL if activation == "silu" else Epilogue.GELU_MUL


def _take(layer: ColumnLinear | RowLinear | VocabTable, machine: Machine) -> Packed:
    """Pack a layer's weight and let go of the unpacked one."""
    packed = machine.pack(layer.weight.data)
    layer.weight.data = layer.weight.data.new_empty(0)
    return packed


def _norm_weight(norm: Norm | SplitNorm | None) -> Tensor | None:
    if norm is None:
        return None
    return norm.weight.detach().float() + (1.0 if norm.plus_one else 0.0)
