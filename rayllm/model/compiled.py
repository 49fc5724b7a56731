"""A decoder on a CPU as a program for the compiled kernels: one call a step instead of dozens a layer.

Activations are float32 between products; weights and cache keep their dtype. With a dtype of 16 bits products with
quantized weights round them to two bytes, 32 entries to a scale, which keeps more than bfloat16 does. Tokens come out
the same bits whatever else is in the step, because every sum in the kernels has a fixed order.

Where ranks divide the layers, a program is carried out in stretches, between which the ranks meet.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rayllm.errors import ConfigError
from rayllm.model.compiled_mla import Buffers, PackedLatent
from rayllm.model.decoder import Decoder, DecoderLayer, Mlp, of_all_ranks
from rayllm.model.dequantize import dequantize
from rayllm.model.layers import ColumnLinear, Embedded, Norm, Quantized, RowLinear, SplitNorm, VocabTable, own_tokens
from rayllm.model.mla import LatentAttention
from rayllm.model.moe import Moe, Router, SharedGate
from rayllm.model.spec import Activation, CacheSpec
from rayllm_kernels import AttentionBatch
from rayllm_kernels.native.library import BLOCK, EPILOGUES, Kind, Machine, Packed, PackedExperts, pair
from rayllm_kernels.native.library import Router as RouterFields
from rayllm_kernels.native.program import Heads, LayerCache, Program, cache_bytes, fits
from rayllm_kernels.storage import DTYPES, LAYER_SCALED, layer_scales

log = logging.getLogger(__name__)

KEPT_KINDS = frozenset(kind.name for kind in BLOCK)
"""Quantized kinds that are multiplied as they are stored."""
RESIDUAL, NORMED, QKV, ATTENDED, BRANCH, INNER, SCORES, GATE, QUERY_LOW, QUERY_REST, HEAD_VALUES = range(11)
"""Buffers of a program."""
LATENT = Buffers(low=QUERY_LOW, rest=QUERY_REST, heads=QKV, attended=ATTENDED, values=HEAD_VALUES)
EMBEDDING = 1
"""Instructions of a program that fill the residual stream at first."""


class CompiledDecoder:
    """Stands in for a `Decoder`, whose weights it takes over: they are packed, and the decoder is empty afterwards."""

    def __init__(self, decoder: Decoder, threads: int, max_tokens: int) -> None:
        """`max_tokens` is the most in a step."""
        self.spec, self.ranks = decoder.spec, decoder.ranks
        self._group, self._numbers = decoder.place.group, decoder.numbers
        self._ropes, self._cache_specs = decoder.ropes, decoder.cache_specs()
        tables = [rope.table_PR for rope in decoder.ropes]
        self._angles = None if any(table is None for table in tables) else tables
        self._layout = decoder.layout
        self._scales = [layer.attention.kv_scales_2 for layer in decoder.layers]
        self._measures_scales = decoder.measures_scales
        self._max_tokens = max_tokens
        self._machine = Machine(threads)
        self.sampling = self._machine.sampling()
        self._embedding_scale = float(decoder.embedding_scale)
        packer = _Packer(self._machine, integer=decoder.place.dtype != torch.float32)
        self._embed = _Table.of(packer, decoder.embed)
        self._head = self._embed if decoder.head is decoder.embed else _Table.of(packer, decoder.head)
        self._norm_weight = _norm_weight(decoder.norm)
        self._layers = [_Layer(layer, decoder.spec.activation, packer) for layer in decoder.layers]
        chosen = 0 if decoder.spec.moe is None else decoder.spec.moe.experts_per_token
        blocks = [i for i, layer in zip(self._numbers, self._layers, strict=True) if isinstance(layer.mlp, _Moe)]
        self._routes = {i: torch.zeros(max_tokens, chosen, dtype=torch.int64) for i in blocks}
        """For each layer with experts, those of the tokens of a step."""
        self._weights = torch.zeros(max_tokens, chosen)
        self._tokens = 0
        attention = decoder.layers[0].attention
        self._heads, self._kv_heads, self._owns_keys = attention.heads, attention.kv_heads, attention.owns_keys
        self._inner = max(layer.mlp.inner_rows for layer in decoder.layers)
        self._program: Program | None = None
        self._meetings: list[tuple[int, Callable[[int], None]]] = []
        """Instructions of its program before which the ranks meet, and what they do then with so many tokens."""
        self._stores: list[tuple[int, int]] = []
        """For each layer, the instructions of its program that come to its keys and values and store them."""
        self._caches: object = None

    def cache_specs(self) -> list[CacheSpec]:
        """What each layer caches."""
        return self._cache_specs

    def cache_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers of a group."""
        specs = [self._cache_specs[layer] for layer in self._layout.largest(len(self._cache_specs))]
        return sum(cache_bytes(block_size, s.kv_heads, s.head_size, DTYPES[s.dtype], s.value_in_key) for s in specs)

    def new_caches(self, num_blocks: int, block_size: int) -> list[LayerCache]:
        """Empty caches, one for each layer (groups of layers share their memory), to be handed to every call.

        Raises:
            ConfigError: the kernels cannot use blocks of this size.
        """
        if not fits(block_size):
            raise ConfigError("--block-size", f"{block_size} is no divisor and no multiple of 16", "choose 16 or 32")
        specs = self._cache_specs
        caches = [
            LayerCache(num_blocks, block_size, s.kv_heads, s.head_size, DTYPES[s.dtype], s.value_in_key)
            for s in (specs[i] for i in self._layout.largest(len(specs)))
        ]
        places = zip(self._layout.places(len(specs)), self._scales, strict=True)
        return [caches[index].of_layer(group, scales_2) for (group, index), scales_2 in places]

    def __call__(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        batch: AttentionBatch,
        caches: list[LayerCache],
        embedded: Embedded | None = None,
        hidden_TD: Tensor | None = None,
    ) -> Tensor:
        """Run one step: (T, D) float32, normalised; a view that the next step overwrites.

        For `hidden_TD`, and what a stage before the last returns, see `Decoder.forward`.
        """
        if self._caches is not caches:
            self._program, self._caches = self._build(caches), caches
        self._tokens = len(token_ids_T)
        assert self._program is not None
        own_T, mine_T = token_ids_T, None
        if hidden_TD is None and self._group.size > 1:
            assert self._embed is not None
            own_T, mine_T = own_tokens(token_ids_T, self._embed.start, self._embed.rows.n)
        result = NORMED if self.ranks.last else RESIDUAL
        if self._angles is not None:
            plain = partial(self._program.run, self._machine, own_T, batch, self._angles, result, positions_T)
        else:
            angles = [rope(positions_T) for rope in self._ropes]
            plain = partial(self._program.run, self._machine, own_T, batch, angles, result)
        run = partial(self._run_divided, plain, len(token_ids_T)) if self._meetings else plain
        residual_TD = self._program.buffer(RESIDUAL)[: len(token_ids_T)]
        begin = 0
        if hidden_TD is not None:
            residual_TD.copy_(hidden_TD)
        elif embedded is not None or mine_T is not None:
            begin = EMBEDDING
            run(end=begin)
            if mine_T is not None:
                residual_TD.copy_(self._group.all_reduce(residual_TD * mine_T.unsqueeze(1)))
            if embedded is not None:
                scale = 1.0 if self.spec.embedded_scaled else self._embedding_scale
                residual_TD[embedded.at_N] = embedded.rows_ND * scale
        if self._measures_scales:
            self._measures_scales = False
            begin = self._measure(self._program.buffer(QKV)[: len(token_ids_T)], run, begin)
        return run(begin=begin)

    def _run_divided(self, run: Callable[..., Tensor], tokens: int, begin: int = 0, end: int | None = None) -> Tensor:
        """Run a program's instructions, and meet with the other ranks between them."""
        for at, meet in self._meetings:
            if begin < at and (end is None or at <= end):
                run(begin=begin, end=at)
                meet(tokens)
                begin = at
        return run(begin=begin, end=end)

    def _add_branches(self, tokens: int) -> None:
        """Add up what each rank's share of attention or MLP gave."""
        assert self._program is not None
        branch_TD = self._program.buffer(BRANCH)[:tokens]
        branch_TD.copy_(self._group.all_reduce(branch_TD))

    def _norm_heads(self, layer: "_Layer", tokens: int) -> None:
        """Norm queries, and keys, over the heads of all ranks."""
        assert self._program is not None
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        spec, group = self.spec, self._group
        sizes = [len(layer.q_norm), len(layer.k_norm)]
        parts = self._program.buffer(QKV)[:tokens, : sum(sizes)].split(sizes, dim=1)
        squares_T2 = torch.stack([part.square().sum(dim=1) for part in parts], dim=1)
        squares_T2[:, 1] *= self._owns_keys  # heads that ranks share are counted once
        total_T2 = group.all_reduce(squares_T2)
        counts_2 = torch.tensor([spec.num_heads, spec.num_kv_heads]) * spec.head_size
        scale_T2 = torch.rsqrt(total_T2 / counts_2 + spec.norm_eps)
        for part, weight, scale_T in zip(parts, (layer.q_norm, layer.k_norm), scale_T2.unbind(1), strict=True):
            part.mul_(scale_T.unsqueeze(1)).mul_(weight)

    def _exchange(self, moe: "_Moe", index: int, source: int, tokens: int) -> None:
        """Have the ranks compute each others' experts, and add the outputs to the branch."""
        assert self._program is not None
        x_TD, branch_TD = self._program.buffer(source)[:tokens], self._program.buffer(BRANCH)[:tokens]
        x_SD, places_SK, weights_SK = moe.exchange.dispatch(x_TD, self._routes[index][:tokens], self._weights[:tokens])
        y_TD = moe.exchange.combine(self._machine.experts(x_SD, places_SK, weights_SK, moe.experts))
        if moe.shared is None:
            branch_TD.copy_(y_TD)
        else:
            branch_TD.copy_(self._group.all_reduce(branch_TD) + y_TD)

    def kv_scales(self) -> list[tuple[float, float]]:
        """By what each layer divides keys and values, if its cache has scales of a layer."""
        return [tuple(scales_2.tolist()) for scales_2 in self._scales]

    @property
    def experts(self) -> dict[int, PackedExperts]:
        """Those that this rank holds, for each layer that has some; their tensors may be overwritten between steps."""
        blocks = zip(self._numbers, self._layers, strict=True)
        return {i: layer.mlp.experts for i, layer in blocks if isinstance(layer.mlp, _Moe)}

    @property
    def routed(self) -> dict[int, Tensor]:
        """See `Decoder.routed`; views that the next step overwrites."""
        return {layer: ids[: self._tokens] for layer, ids in self._routes.items()}

    def _measure(self, qkv_TE: Tensor, run: Callable[..., Tensor], at: int) -> int:
        """Run a step from instruction `at` up to the last layer whose scales it sets; where it is to go on then.

        The keys and values of a layer are computed and stored once to measure them, and once more with the scales.
        """
        key = self._kv_heads * self.spec.head_size
        for spec, scales_2, (begin, end) in zip(self._cache_specs, self._scales, self._stores, strict=True):
            dtype = DTYPES[spec.dtype]
            if dtype in LAYER_SCALED:
                run(begin=at, end=end)
                kept = (qkv_TE[:, -key:],) * 2 if spec.value_in_key else qkv_TE[:, -2 * key :].split(key, dim=1)
                scales_2.copy_(of_all_ranks(layer_scales(*kept, dtype), self._group))
                at = begin
        log.info("scales of keys and values: %s", self.kv_scales())
        return at

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits over the whole vocabulary, (R, V) float32, with the model's own scale and cap."""
        assert self._head is not None
        logits_RV = self._own_logits(hidden_RD)
        if self._group.size == 1:
            return logits_RV
        padded_RV = torch.nn.functional.pad(logits_RV, (0, self._head.most - self._head.rows.n))
        return self._group.all_gather(padded_RV)[:, : self.spec.vocab_size]

    def _own_logits(self, hidden_RD: Tensor) -> Tensor:
        """Those of the tokens whose rows are on this rank."""
        assert self._head is not None
        logits_RV = self._machine.linear(hidden_RD.contiguous(), self._head.rows)
        if self.spec.logits_scale != 1.0:
            logits_RV = logits_RV / self.spec.logits_scale
        if self.spec.final_soft_cap is not None:
            logits_RV = torch.tanh(logits_RV / self.spec.final_soft_cap) * self.spec.final_soft_cap
        return logits_RV

    def likeliest(self, hidden_RD: Tensor) -> Tensor:
        """The first of the largest logits of each row, (R) int64, for less."""
        assert self._head is not None
        if self._group.size > 1:
            logits_RV = self._own_logits(hidden_RD)
            best_R = self._machine.argmax(logits_RV)
            value_R = logits_RV.gather(1, best_R.unsqueeze(1))[:, 0]
            # A double holds both without rounding.
            best_R2 = torch.stack((value_R.double(), (best_R + self._head.start).double()), dim=1)
            value_GR, best_GR = self._group.all_gather(best_R2, dim=0).view(self._group.size, -1, 2).unbind(2)
            return best_GR.gather(0, value_GR.argmax(0, keepdim=True))[0].long()
        if self.spec.final_soft_cap is not None:
            return self._machine.argmax(self.logits(hidden_RD))  # a cap can make different logits equal
        return self._machine.best_columns(hidden_RD.contiguous(), self._head.rows)

    def _build(self, caches: list[LayerCache]) -> Program:
        spec = self.spec
        query = self._heads * spec.head_size
        key = self._kv_heads * spec.head_size
        inner = -(-self._inner // 16) * 16
        width, scores = spec.hidden_size, spec.moe.num_experts if spec.moe is not None else 0
        widths = dict(enumerate((width, width, query + 2 * key, query, width, inner, scores, 1)))
        if spec.mla is not None:
            widths |= LATENT.widths(spec.mla, self._heads)
        program = Program(tuple(widths[i] for i in sorted(widths)), self._max_tokens)
        if self.ranks.first:
            assert self._embed is not None
            program.embed(RESIDUAL, self._embed.rows, self._embedding_scale)
        self._meetings, self._stores = [], []
        first = True
        for index, layer, cache in zip(self._numbers, self._layers, caches, strict=True):
            self._branch_in(program, layer.input_norm, first)
            first = False
            self._attention(program, layer, index, cache)
            self._branch_out(program, layer.post_attention_norm)
            self._branch_in(program, layer.mlp_norm, first)
            source = NORMED if layer.mlp_norm is not None else RESIDUAL
            exchange = None
            if isinstance(layer.mlp, _Moe):
                exchange = self._experts(program, layer.mlp, index, source)
            else:
                layer.mlp.emit(program, source)
            self._branch_out(program, layer.post_mlp_norm, exchange)
        if self._norm_weight is None:
            program.add(BRANCH, RESIDUAL, spec.residual_scale)
        else:
            program.add_norm(BRANCH, RESIDUAL, NORMED, self._norm_weight, spec.norm_eps, spec.residual_scale)
        program.finish()
        return program

    def _experts(self, program: Program, moe: "_Moe", index: int, source: int) -> Callable[[int], None] | None:
        """Experts to the branch, after the MLP that every token goes through; or what is to do it by the ranks."""
        if moe.shared is not None:
            moe.shared.emit(program, source)
        if moe.shared_gate is not None:
            moe.shared_gate.emit(program, source, GATE)
            program.gate(GATE, BRANCH)
        moe.scores.emit(program, source, SCORES)
        program.route(SCORES, moe.router, self._routes[index], self._weights)
        if moe.held:
            return partial(self._exchange, moe, index, source)
        program.experts(source, BRANCH, moe.experts, self._routes[index], self._weights, moe.shared is not None)
        return None

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

    def _branch_out(self, program: Program, norm: Tensor | None, exchange: Callable[[int], None] | None = None) -> None:
        if exchange is not None or self._group.size > 1:
            self._meetings.append((len(program), exchange or self._add_branches))
        if norm is not None:
            program.norm(BRANCH, BRANCH, norm, self.spec.norm_eps)

    def _attention(self, program: Program, layer: "_Layer", index: int, cache: LayerCache) -> None:
        spec = self.spec
        query = self._heads * spec.head_size
        source = NORMED if layer.input_norm is not None else RESIDUAL
        rope = spec.layer_rope[index]
        heads = Heads(self._heads, rope, spec.ropes[rope].size)
        begin = len(program)
        if layer.latent is not None:
            layer.latent.project(program, source, LATENT, rope, cache)
            self._stores.append((begin, len(program)))
            layer.latent.attend(program, BRANCH, LATENT, cache)
            return
        if spec.qk_norm == "head":
            heads = replace(heads, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=spec.norm_eps)
        if spec.head_size % 16 == 0 and spec.qk_norm != "all":
            for offset, matrix, bias in layer.qkv.parts():
                program.project(source, QKV, matrix, bias, heads, cache, offset)
        else:
            layer.qkv.emit(program, source, QKV)
            if spec.qk_norm == "all" and self._group.size > 1:
                self._meetings.append((len(program), partial(self._norm_heads, layer)))
            elif spec.qk_norm == "all" and layer.q_norm is not None and layer.k_norm is not None:
                program.norm(QKV, QKV, layer.q_norm, spec.norm_eps)
                program.norm(QKV, QKV, layer.k_norm, spec.norm_eps, offset=query)
            program.rotate_and_store(QKV, heads, cache)
        self._stores.append((begin, len(program)))
        program.attention(
            QKV, ATTENDED, self._heads, spec.query_scale, spec.attention_soft_cap, spec.windows[index], cache,
            layer.sinks,
        )  # fmt: skip
        layer.out.emit(program, ATTENDED, BRANCH)


@dataclass(frozen=True, slots=True)
class _Packer:
    """Packs matrices; for products in integers if `integer`, but those of float32."""

    machine: Machine
    integer: bool

    def __call__(self, rows: Tensor | Quantized) -> Packed:
        if not isinstance(rows, Quantized):
            return self.machine.pack(rows, integer=self.integer and rows.dtype != torch.float32)
        kind = Kind[rows.kind]
        entries, size = BLOCK[kind]
        depth = rows.rows.shape[1] // size * entries
        return self.machine.pack(rows.rows, kind, depth, integer=self.integer)


_Matrix = ColumnLinear | RowLinear | Router | SharedGate


class _Product:
    """The packed matrix of one layer, or one for each run of parts that are stored alike."""

    def __init__(self, packer: _Packer, layer: _Matrix) -> None:
        """Packs the layer's weight and lets go of the unpacked one."""
        self.pieces: list[tuple[int, Packed]] = []
        """(first output column, matrix)."""
        bias: Tensor | None = getattr(layer, "bias", None)
        added = not isinstance(layer, RowLinear) or layer.group.rank == 0  # once, where ranks add their products
        self._bias = bias if added else None
        for offset, rows in _runs(layer):
            self.pieces.append((offset, packer(rows)))
        _let_go(layer)

    def emit(self, program: Program, src: int, dst: int) -> None:
        """Append the products to a program."""
        for offset, matrix, bias in self.parts():
            program.linear(src, dst, matrix, bias, offset=offset)

    def parts(self) -> Iterator[tuple[int, Packed, Tensor | None]]:
        """(first output column, matrix, its bias)."""
        for offset, matrix in self.pieces:
            yield offset, matrix, None if self._bias is None else self._bias[offset : offset + matrix.n]


@dataclass(frozen=True, slots=True)
class _Table:
    """The packed rows of tokens that are on this rank."""

    rows: Packed
    start: int
    most: int
    """Rows on the rank that has most."""

    @classmethod
    def of(cls, packer: _Packer, table: VocabTable | None) -> "_Table | None":
        """Packs a table and lets go of the unpacked one."""
        if table is None:
            return None
        rows = table.quantized.get("", table.weight.data[: table.held])
        packed = cls(packer(rows), table.start, len(table.weight))
        _let_go(table)
        return packed


def _runs(layer: _Matrix) -> Iterator[tuple[int, Tensor | Quantized]]:
    """(first row, rows) of a layer's matrix, as few runs as there are kinds in a row."""
    if not layer.quantized:
        yield 0, layer.weight.data
        return
    if not isinstance(layer, ColumnLinear):
        yield 0, layer.quantized[""]
        return
    sizes = dict(zip(layer.parts, layer.sizes, strict=True))
    offset = 0
    for kind, names in itertools.groupby(
        layer.parts, lambda name: layer.quantized[name].kind if name in layer.quantized else None
    ):
        run = list(names)
        size = sum(sizes[name] for name in run)
        if kind is None:
            yield offset, layer.weight.data[offset : offset + size]
        else:
            yield offset, Quantized(kind, torch.cat([layer.quantized[name].rows for name in run]))
        offset += size


def _let_go(layer: _Matrix | VocabTable) -> None:
    layer.weight.data = layer.weight.data.new_empty(0)
    layer.quantized = {}


def _pack_gated(packer: _Packer, layer: ColumnLinear) -> Packed:
    """Gate and up of a layer, taking turns."""
    half = layer.sizes[0]
    gate, up = layer.quantized.get("gate"), layer.quantized.get("up")
    if gate is not None and up is not None and gate.kind == up.kind:
        packed = packer(Quantized(gate.kind, pair(gate.rows, up.rows)))
    else:
        for start, part in ((0, gate), (half, up)):
            if part is not None:
                layer.weight.data[start : start + half] = dequantize(part.rows, part.kind)
        packed = packer(pair(layer.weight.data[:half], layer.weight.data[half:]))
    _let_go(layer)
    return packed


class _Layer:
    """Packed weights of one layer."""

    def __init__(self, layer: DecoderLayer, activation: Activation, packer: _Packer) -> None:
        attention, mlp = layer.attention, layer.mlp
        self.input_norm = _norm_weight(layer.input_norm)
        self.post_attention_norm = _norm_weight(layer.post_attention_norm)
        self.mlp_norm = _norm_weight(layer.mlp_norm)
        self.post_mlp_norm = _norm_weight(layer.post_mlp_norm)
        self.latent = PackedLatent(attention, packer) if isinstance(attention, LatentAttention) else None
        if self.latent is None:
            self.q_norm, self.k_norm = _norm_weight(attention.q_norm), _norm_weight(attention.k_norm)
            self.qkv, self.out = _Product(packer, attention.qkv), _Product(packer, attention.out)
            self.sinks = None if attention.sinks is None else attention.sinks.weight
        self.mlp = _Moe(mlp, activation, packer) if isinstance(mlp, Moe) else _Mlp(mlp, activation, packer)


class _Mlp:
    """Packed weights of a gated MLP."""

    def __init__(self, mlp: Mlp, activation: Activation, packer: _Packer) -> None:
        self._gate_up, self._down = _pack_gated(packer, mlp.gate_up), _Product(packer, mlp.down)
        half, bias = mlp.gate_up.sizes[0], mlp.gate_up.bias
        self._bias = None if bias is None else pair(bias[:half, None], bias[half:, None])[:, 0]
        self._epilogue = EPILOGUES[activation]

    def emit(self, program: Program, source: int) -> None:
        """Append it to a program: from a buffer to the branch."""
        program.linear(source, INNER, self._gate_up, self._bias, self._epilogue)
        self._down.emit(program, INNER, BRANCH)


class _Moe:
    """Packed weights of a layer's experts."""

    def __init__(self, moe: Moe, activation: Activation, packer: _Packer) -> None:
        router, spec = moe.router, moe.experts.spec
        self.scores = _Product(packer, router)
        self.correction = router.correction
        self.router = RouterFields(
            spec.num_experts, spec.experts_per_token, spec.groups, spec.groups_per_token, spec.scores == "sigmoid",
            spec.group_score == "two_best", spec.normalised, 0,
            None if router.correction is None else router.correction.data_ptr(), spec.scale,
        )  # fmt: skip
        self.experts = packer.machine.pack_experts(moe.experts.weights(), spec.input_scaled, integer=packer.integer)
        moe.experts.let_go()
        self.held, self.exchange = moe.experts.held is not None, moe.experts.exchange
        self.shared = None if moe.shared is None else _Mlp(moe.shared, activation, packer)
        self.shared_gate = None if moe.shared_gate is None else _Product(packer, moe.shared_gate)


def _norm_weight(norm: Norm | SplitNorm | None) -> Tensor | None:
    if norm is None:
        return None
    return norm.weight.detach().float() + (1.0 if norm.plus_one else 0.0)
