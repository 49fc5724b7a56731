"""Latent attention as instructions of the compiled kernels. See `mla` for what is computed, and for letters."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rayllm.model.layers import ColumnLinear, RowLinear
from rayllm.model.mla import LatentAttention
from rayllm.model.spec import MlaSpec
from rayllm_kernels.native.library import Packed, side_by_side
from rayllm_kernels.native.program import Heads, LayerCache, Program

Pack = Callable[[Tensor], Packed]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Those of a program that latent attention works on, by number."""

    low: int
    """What queries are projected from."""
    rest: int
    """Of every query, what is not rotated."""
    heads: int
    """Queries as they are compared with what is cached, and behind them what is to be cached."""
    attended: int
    values: int

    def widths(self, mla: MlaSpec, heads: int) -> dict[int, int]:
        """Columns by number, for so many heads."""
        return {
            self.low: mla.q_lora_rank or 1,
            self.rest: heads * mla.qk_nope_head_dim,
            self.heads: (heads + 1) * (mla.qk_rope_head_dim + mla.kv_lora_rank),
            self.attended: heads * mla.kv_lora_rank,
            self.values: heads * mla.v_head_dim,
        }


class PackedLatent:
    """Packed weights of the latent attention of one layer."""

    def __init__(self, attention: LatentAttention, pack: Pack) -> None:
        """Packs the layer's weights and lets go of the unpacked ones."""
        self._mla, self._heads, self._scale = attention.mla, attention.heads, attention.scale
        rotated = self._mla.qk_rope_head_dim
        self._q_a = None if attention.q_a is None else _Linear(attention.q_a, pack)
        self._q_a_norm = None if attention.q_a_norm is None else attention.q_a_norm.weight
        queries_NED = attention.q.weight.unflatten(0, (self._heads, -1))
        self._q_rotated = pack(side_by_side(queries_NED[:, :rotated]))
        self._q_rest = pack(queries_NED[:, rotated:].flatten(0, 1))
        _let_go(attention.q)
        self._kv_a = _Linear(attention.kv_a, pack)
        self._kv_a_norm = attention.kv_a_norm.weight
        to_key_NPL, to_value_NVL = attention.projections()
        self._to_key, self._to_value = pack(side_by_side(to_key_NPL.mT)), pack(side_by_side(to_value_NVL))
        _let_go(attention.kv_b)
        self._out = _Linear(attention.out, pack)

    def project(self, program: Program, src: int, at: Buffers, rope: int, cache: LayerCache) -> None:
        """Append what comes before the attention: queries, and what is cached."""
        mla, heads, size = self._mla, self._heads, cache.head_size
        rotated = mla.qk_rope_head_dim
        low = src
        if self._q_a is not None and self._q_a_norm is not None:
            self._q_a.emit(program, src, at.low)
            program.norm(at.low, at.low, self._q_a_norm, mla.norm_eps)
            low = at.low
        program.head_linear(low, at.heads, self._q_rotated, heads, rotated, dst_step=size)
        program.linear(low, at.rest, self._q_rest)
        program.head_linear(
            at.rest, at.heads, self._to_key, heads, mla.kv_lora_rank, size, mla.qk_nope_head_dim, offset=rotated
        )
        self._kv_a.emit(program, src, at.heads, heads * size)
        program.norm(at.heads, at.heads, self._kv_a_norm, mla.norm_eps, offset=heads * size + rotated)
        program.rotate_and_store(at.heads, Heads(heads, rope, rotated), cache)

    def attend(self, program: Program, dst: int, at: Buffers, cache: LayerCache) -> None:
        """Append the attention, and the products after it."""
        mla, heads = self._mla, self._heads
        program.attention(at.heads, at.attended, heads, self._scale, None, None, cache)
        program.head_linear(
            at.attended, at.values, self._to_value, heads, mla.v_head_dim, mla.v_head_dim, mla.kv_lora_rank
        )
        self._out.emit(program, at.values, dst)


class _Linear:
    """A packed matrix and its bias."""

    def __init__(self, layer: ColumnLinear | RowLinear, pack: Pack) -> None:
        once = isinstance(layer, ColumnLinear) or layer.group.rank == 0  # where ranks add their products
        self._weight, self._bias = pack(layer.weight.data), layer.bias if once else None
        _let_go(layer)

    def emit(self, program: Program, src: int, dst: int, offset: int = 0) -> None:
        program.linear(src, dst, self._weight, self._bias, offset=offset)


def _let_go(layer: ColumnLinear | RowLinear) -> None:
    layer.weight.data = layer.weight.data.new_empty(0)
