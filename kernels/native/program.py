"""Programs: a decoder's step as instructions for the compiled kernels.

All buffers are float32 rows, one for each token of the step, at most `max_tokens` of them. Instructions name buffers by
number; the fields they use are written by the method of the same name below, and nowhere else.
"""

from copy import copy
from ctypes import addressof, byref, c_int64, c_void_p, sizeof
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from rayllm_kernels.batch import AttentionBatch
from rayllm_kernels.native.library import LANES, Epilogue, Instruction, Machine, Packed, PackedExperts, Router, Step
from rayllm_kernels.native.memory import zeros
from rayllm_kernels.storage import HEAD_SCALED

CACHE_KINDS = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2,
    torch.float8_e4m3fn: 16, torch.float8_e5m2: 17, torch.int8: 18, torch.uint8: 19,
}  # fmt: skip
"""As in cpu.cpp."""


class Op(IntEnum):
    """Order as in cpu.cpp."""

    EMBED = 0
    NORM = 1
    ADD = 2
    ADD_NORM = 3
    LINEAR = 4
    HEAD_NORM = 5
    ROTATE_AND_STORE = 6
    ATTENTION = 7
    PROJECT = 8
    ROUTE = 9
    EXPERTS = 10
    GATE = 11
    HEAD_LINEAR = 12


class Program:
    """Instructions, the buffers they work on, and the tensors they point at, which it keeps alive."""

    def __init__(self, widths: tuple[int, ...], max_tokens: int) -> None:
        """`widths` are the columns of the buffers."""
        self._buffers = [torch.zeros(max_tokens, width) for width in widths]
        self._widths = widths
        self._steps: list[Instruction] = []
        self._kept: list[object] = []
        self._max_tokens = max_tokens
        self._groups = 1

    def embed(self, dst: int, table: Packed, scale: float) -> None:
        """Rows of the table by token id, times `scale`."""
        self._add(Op.EMBED, dst=dst, kind=table.kind, n=table.n, k=table.k, weight=self._packed(table), f0=scale)

    def norm(self, src: int, dst: int, weight: Tensor, eps: float, offset: int = 0) -> None:
        """RMS norm of the columns from `offset` on, as many as `weight` has."""
        self._add(Op.NORM, src=src, dst=dst, n=len(weight), offset=offset, weight=self._floats(weight), f0=eps)

    def add(self, src: int, total: int, scale: float = 1.0) -> None:
        """Total plus `scale` times src, in place."""
        self._add(Op.ADD, src=src, other=total, n=self._widths[total], f1=scale)

    def add_norm(self, src: int, total: int, dst: int, weight: Tensor, eps: float, scale: float = 1.0) -> None:
        """As `add`, and the norm of the sum to dst."""
        self._add(
            Op.ADD_NORM, src=src, other=total, dst=dst, n=len(weight), weight=self._floats(weight), f0=eps, f1=scale
        )

    def linear(
        self,
        src: int,
        dst: int,
        weight: Packed,
        bias: Tensor | None = None,
        epilogue: Epilogue = Epilogue.PLAIN,
        offset: int = 0,
    ) -> None:
        """Products of src with a matrix, from column `offset` on; or act(gate) * up, of a matrix that `pair` made."""
        assert weight.k <= self._widths[src]
        self._add(Op.LINEAR, src=src, dst=dst, epilogue=epilogue, offset=offset, **self._product(weight, bias))

    def head_linear(
        self, src: int, dst: int, weight: Packed, heads: int, n: int, dst_step: int, src_step: int = 0, offset: int = 0
    ) -> None:
        """Of each head its own product, of `n` columns: `weight` is a packed matrix that `side_by_side` made.

        Head h multiplies the columns of src from h * `src_step` on, and fills those of dst from `offset` +
        h * `dst_step` on.
        """
        assert weight.n == heads * (-(-n // LANES) * LANES), (weight.n, heads, n)
        assert (heads - 1) * src_step + weight.k <= self._widths[src]
        assert offset + (heads - 1) * dst_step + n <= self._widths[dst]
        self._add(
            Op.HEAD_LINEAR, src=src, dst=dst, heads=heads, head=dst_step, step=src_step, offset=offset,
            **{**self._product(weight, None), "n": n},
        )  # fmt: skip

    def project(
        self,
        src: int,
        qkv: int,
        weight: Packed,
        bias: Tensor | None,
        heads: "Heads",
        cache: "LayerCache",
        offset: int = 0,
    ) -> None:
        """As `linear` and then `rotate_and_store`, of whole heads: those that begin at column `offset`.

        A head is finished as soon as its products are there. Its size is a multiple of 16.
        """
        assert cache.head_size % 16 == 0, cache.head_size
        self._add(
            Op.PROJECT, src=src, dst=qkv, offset=offset,
            **self._product(weight, bias), **self._heads(heads), **self._cache(cache),
        )  # fmt: skip

    def head_norm(self, buffer: int, offset: int, heads: int, weight: Tensor, eps: float) -> None:
        """RMS norm of each of `heads` heads that begin at column `offset`, in place."""
        self._add(
            Op.HEAD_NORM, src=buffer, offset=offset, heads=heads, head=len(weight), weight=self._floats(weight), f0=eps
        )

    def rotate_and_store(self, qkv: int, heads: "Heads", cache: "LayerCache") -> None:
        """Norm and rotate queries and keys in place and store keys and values at the step's slots."""
        self._add(Op.ROTATE_AND_STORE, src=qkv, **self._heads(heads), **self._cache(cache))

    def attention(
        self,
        qkv: int,
        dst: int,
        heads: int,
        scale: float,
        cap: float | None,
        window: int | None,
        cache: "LayerCache",
        sinks_N: Tensor | None = None,
    ) -> None:
        """Causal attention of the queries over the cache."""
        self._add(
            Op.ATTENTION, src=qkv, dst=dst, heads=heads, f0=scale, f1=cap or 0.0, window=window or 0,
            sinks=None if sinks_N is None else self._floats(sinks_N), **self._cache(cache),
        )  # fmt: skip

    def route(self, logits: int, router: Router, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """The experts of each token by its logits, and their weights: to the rows of `ids_TK` and `weights_TK`."""
        assert len(ids_TK) == len(weights_TK) >= self._max_tokens
        assert self._widths[logits] >= router.experts
        self._kept.append(router)
        self._add(Op.ROUTE, src=logits, weight=addressof(router), **self._routed(ids_TK, weights_TK))

    def experts(
        self, src: int, dst: int, experts: PackedExperts, ids_TK: Tensor, weights_TK: Tensor, add: bool = False
    ) -> None:
        """See `experts.experts`: the outputs of those that the rows of `ids_TK` name, to dst or added to it."""
        self._kept.append(experts)
        self._add(
            Op.EXPERTS, src=src, dst=dst, n=ids_TK.shape[1], offset=add, weight=addressof(experts.fields),
            **self._routed(ids_TK, weights_TK),
        )  # fmt: skip

    def gate(self, src: int, dst: int) -> None:
        """Dst times the sigmoid of the first column of src, in place."""
        self._add(Op.GATE, src=src, dst=dst, n=self._widths[dst])

    def finish(self) -> None:
        """No more instructions follow."""
        self._program = (Instruction * len(self._steps))(*self._steps)
        self._addresses = (c_void_p * len(self._buffers))(*(b.data_ptr() for b in self._buffers))
        self._strides = (c_int64 * len(self._widths))(*self._widths)

    def __len__(self) -> int:
        """Instructions so far."""
        return len(self._steps)

    def run(
        self,
        machine: Machine,
        token_ids_T: Tensor,
        batch: AttentionBatch,
        angles: list[Tensor],
        result: int,
        angle_rows_T: Tensor | None = None,
        begin: int = 0,
        end: int | None = None,
    ) -> Tensor:
        """Carry out a step; a view of the rows of buffer `result`, valid until the next step.

        `token_ids_T` and `angle_rows_T` are int64. `angles` holds, for each rope, rows of cosines, then sines; a token
        takes the row that `angle_rows_T` says, or one each. With `begin` and `end` only those instructions are carried
        out, on what the ones before left in the buffers.
        """
        # No call to torch that lets go of the interpreter: a thread that takes it then holds up the step.
        tokens = len(token_ids_T)
        assert tokens <= self._max_tokens, (tokens, self._max_tokens)
        assert token_ids_T.dtype == torch.int64
        table = batch.block_table
        assert table.is_contiguous()
        assert self._groups == 1 or (table.ndim == 3 and len(table) >= self._groups), (self._groups, table.shape)
        assert token_ids_T.is_contiguous()
        pointers = (c_void_p * max(1, len(angles)))(*(a.data_ptr() for a in angles))
        step = Step(
            tokens, len(batch.seq_lens), token_ids_T.data_ptr(), batch.query_start.data_ptr(),
            batch.seq_lens.data_ptr(), table.data_ptr(), table.shape[-1], batch.slot_mapping.data_ptr(), pointers,
            None if angle_rows_T is None else angle_rows_T.data_ptr(),
        )  # fmt: skip
        if (shared := batch.shared) is not None:
            step.sharers, step.num_sharers = shared.requests.data_ptr(), len(shared.requests)
            step.shared = shared.tokens
        first = byref(self._program, begin * sizeof(Instruction))
        machine.run(first, (len(self) if end is None else end) - begin, self._addresses, self._strides, step)
        return self._buffers[result][:tokens]

    def buffer(self, index: int) -> Tensor:
        """(max_tokens, columns) float32, which instructions read and write."""
        return self._buffers[index]

    def _add(self, op: Op, **fields: object) -> None:
        self._steps.append(Instruction(op=op, **fields))

    def _floats(self, values: Tensor) -> int:
        kept = values.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _packed(self, weight: Packed) -> int:
        self._kept.append(weight)
        return weight.address

    def _product(self, weight: Packed, bias: Tensor | None) -> dict[str, Any]:
        """Fields that describe a matrix."""
        return {
            "kind": weight.kind, "integer": weight.integer, "n": weight.n, "k": weight.k,
            "weight": self._packed(weight), "bias": None if bias is None else self._floats(bias),
        }  # fmt: skip

    def _routed(self, ids_TK: Tensor, weights_TK: Tensor) -> dict[str, int]:
        """Fields that say where choices of experts stand."""
        assert ids_TK.dtype == torch.int64
        assert weights_TK.dtype == torch.float32
        assert ids_TK.is_contiguous()
        assert weights_TK.is_contiguous()
        self._kept += [ids_TK, weights_TK]
        return {"keys": ids_TK.data_ptr(), "values": weights_TK.data_ptr()}

    def _heads(self, heads: "Heads") -> dict[str, Any]:
        """Fields that say what becomes of heads."""
        norms = {"q_norm": heads.q_norm, "k_norm": heads.k_norm}
        return {
            "heads": heads.queries, "rope": heads.rope, "rotated": heads.rotated, "f0": heads.eps,
            **{name: self._floats(weight) for name, weight in norms.items() if weight is not None},
        }  # fmt: skip

    def _cache(self, cache: "LayerCache") -> dict[str, Any]:
        """Fields that describe a cache."""
        keys, *values = cache.parts()
        self._kept.append(cache)
        self._groups = max(self._groups, cache.group + 1)
        return {
            "cache_kind": CACHE_KINDS[keys.dtype], "kv_heads": cache.kv_heads, "head": cache.head_size,
            "block": cache.block_size, "value_in_key": cache.value_in_key, "keys": keys.data_ptr(),
            "values": values[0].data_ptr() if values else None,
            "scales": cache.scales_2.data_ptr(), "group": cache.group,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Heads:
    """What becomes of heads: `queries` of queries, then those of keys and of values, as many as the cache has."""

    queries: int
    rope: int
    """Which of the step's angles."""
    rotated: int
    """Columns of a head that are rotated."""
    q_norm: Tensor | None = None
    """(head size) for an RMS norm of each query head before that; none without."""
    k_norm: Tensor | None = None
    eps: float = 0.0


class LayerCache:
    """Keys and values of one layer, in tiles (see cpu.cpp); or keys alone, where these hold their values."""

    group = 0
    """Which of a step's tables of blocks is this layer's."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        value_in_key: int = 0,
    ) -> None:
        """`block_size` is a divisor or a multiple of 16; for `dtype` see `storage`.

        With `value_in_key` so many entries of a key, the last ones, are its value, and no other is stored.
        """
        self.block_size, self.kv_heads, self.head_size = block_size, kv_heads, head_size
        self.value_in_key, self.scales_2 = value_in_key, torch.ones(2)
        sizes = _numbers(num_blocks, block_size, kv_heads, head_size, dtype, value_in_key)
        self._parts = tuple(zeros(n * dtype.itemsize).view(dtype) for n in sizes)

    @classmethod
    def view_of(
        cls, cache: Tensor, head_size: int, scales_2: Tensor | None = None, value_in_key: int = 0
    ) -> "LayerCache":
        """Over the memory of a tensor of the shape that `cache_shape` gave."""
        num_blocks, block_size, kv_heads, _ = cache.shape
        self = cls.__new__(cls)
        self.block_size, self.kv_heads, self.head_size = block_size, kv_heads, head_size
        self.value_in_key, self.scales_2 = value_in_key, torch.ones(2) if scales_2 is None else scales_2
        sizes = _numbers(num_blocks, block_size, kv_heads, head_size, cache.dtype, value_in_key)
        self._parts = tuple(cache.view(-1).split(sizes))
        return self

    def of_layer(self, group: int, scales_2: Tensor) -> "LayerCache":
        """The same memory for a layer of some group, with scales of its own, which are read at every step."""
        other = copy(self)
        other.group, other.scales_2 = group, scales_2
        return other

    def parts(self) -> tuple[Tensor, ...]:
        """Keys, and values if they are stored, flat."""
        return self._parts


def cache_bytes(block_size: int, kv_heads: int, head_size: int, dtype: torch.dtype, value_in_key: int = 0) -> int:
    """Bytes of one block of a layer."""
    return sum(_numbers(1, block_size, kv_heads, head_size, dtype, value_in_key)) * dtype.itemsize


def cache_shape(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype = torch.float32,
    value_in_key: int = 0,
) -> tuple[int, ...]:
    """Keys and values of a layer as one tensor: all keys first, whatever the dimensions say."""
    numbers = sum(_numbers(1, block_size, kv_heads, head_size, dtype, value_in_key))
    return num_blocks, block_size, kv_heads, numbers // (block_size * kv_heads)


def _numbers(
    num_blocks: int, block_size: int, kv_heads: int, head_size: int, dtype: torch.dtype, value_in_key: int
) -> tuple[int, ...]:
    """How many make up the keys and the values of a layer, the bytes of scales counted where they follow each tile."""
    tokens = min(block_size, 16)
    tiles = num_blocks * kv_heads * (block_size // tokens)
    scale = 4 if dtype in HEAD_SCALED else 0
    keys = tiles * (head_size + scale) * 16
    return (keys,) if value_in_key else (keys, tiles * (-(-head_size // 16) * 16 + scale) * tokens)


def fits(block_size: int) -> bool:
    """Whether the kernels can use blocks of this size."""
    return 16 % block_size == 0 or block_size % 16 == 0
