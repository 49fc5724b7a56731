"""Instructions where a program says more than the table's operations do: parts of a buffer, scales, stored kinds."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rayllm_kernels import REFERENCE, AttentionBatch
from rayllm_kernels.native.library import BLOCK, Kind, Machine, side_by_side
from rayllm_kernels.native.program import Heads, LayerCache, Program, cache_bytes, cache_shape
from rayllm_kernels.storage import DTYPES
from tests.kernels.conftest import library_of
from tests.kernels.native.test_products import random_blocks

ROWS = 5
NAN = float("nan")


@pytest.fixture(scope="module")
def machine(variant: str) -> Machine:
    return Machine(2, library_of(variant))


class Bench:
    """A program over two buffers of 40 columns: 0 is random, 1 is NaN."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.program = Program((40, 40), ROWS)
        self.program.buffer(0).copy_(torch.randn(ROWS, 40, generator=torch.Generator().manual_seed(0)))
        self.program.buffer(1).fill_(NAN)
        self.before = self.program.buffer(0).clone()

    def run(self, result: int, ids: Tensor | None = None) -> Tensor:
        self.program.finish()
        batch = AttentionBatch.from_numpy(
            np.array([0, ROWS]), np.array([ROWS]), np.zeros((1, 1)), np.arange(ROWS, dtype=np.int64)
        )
        ids = torch.zeros(ROWS, dtype=torch.int64) if ids is None else ids
        return self.program.run(self._machine, ids, batch, [torch.zeros(0)], result).clone()


@pytest.fixture
def bench(machine: Machine) -> Bench:
    return Bench(machine)


def test_norm_of_some_columns(bench: Bench) -> None:
    weight = torch.rand(7)
    bench.program.norm(0, 1, weight, 0.1, offset=3)
    out = bench.run(1)
    torch.testing.assert_close(out[:, 3:10], REFERENCE.rms_norm(bench.before[:, 3:10], weight, 0.1))
    assert out[:, :3].isnan().all()
    assert out[:, 10:].isnan().all()


def test_norm_of_some_heads(bench: Bench) -> None:
    weight = torch.rand(5)
    bench.program.head_norm(0, 10, 3, weight, 0.1)
    out = bench.run(0)
    wanted = bench.before.clone()
    wanted[:, 10:25] = REFERENCE.rms_norm(wanted[:, 10:25].unflatten(1, (3, 5)), weight, 0.1).flatten(1)
    torch.testing.assert_close(out, wanted)
    assert torch.equal(out[:, :10], wanted[:, :10])
    assert torch.equal(out[:, 25:], wanted[:, 25:])


def test_scaled_sums(bench: Bench) -> None:
    bench.program.buffer(1).fill_(2.0)
    bench.program.add(0, 1, 0.5)
    assert torch.equal(bench.run(1), 2.0 + bench.before * 0.5)


def test_norm_of_a_scaled_sum(bench: Bench) -> None:
    bench.program.buffer(1).fill_(2.0)
    bench.program.add_norm(0, 1, 0, torch.ones(40), 0.1, 0.5)
    torch.testing.assert_close(bench.run(0), REFERENCE.rms_norm(2.0 + bench.before * 0.5, torch.ones(40), 0.1))


def test_product_into_some_columns(bench: Bench, machine: Machine) -> None:
    weight = torch.randn(9, 20)
    bench.program.linear(0, 1, machine.pack(weight), offset=4)
    out = bench.run(1)
    torch.testing.assert_close(out[:, 4:13], bench.before[:, :20] @ weight.T)
    assert out[:, :4].isnan().all()
    assert out[:, 13:].isnan().all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize(("heads", "n", "k"), [(1, 16, 16), (5, 20, 33), (3, 100, 130), (12, 8, 1)])
def test_each_head_has_its_product(variant: str, threads: int, integer: bool, heads: int, n: int, k: int) -> None:
    """The bits of a product by itself, for heads of the source and for one source of all heads; the rest is left."""
    machine = Machine(threads, library_of(variant))
    weight_NEK = torch.randn(heads, n, k).to(torch.bfloat16 if integer else torch.float32)
    packed = machine.pack(side_by_side(weight_NEK), integer=integer)
    alone = [machine.pack(weight, integer=integer) for weight in weight_NEK]
    for rows in (1, 7, 120):
        for step in (0, k + 3):
            program = Program((heads * (k + 3), 2 + heads * (n + 1)), rows)
            program.buffer(0).copy_(torch.randn(rows, heads * (k + 3)))
            program.buffer(1).fill_(NAN)
            program.head_linear(0, 1, packed, heads, n, n + 1, step, offset=2)
            program.finish()
            batch = AttentionBatch.from_numpy(
                np.array([0, rows]), np.array([rows]), np.zeros((1, 1)), np.arange(rows, dtype=np.int64)
            )
            out = program.run(machine, torch.zeros(rows, dtype=torch.int64), batch, [torch.zeros(0)], 1)
            assert out[:, :2].isnan().all()
            for head, part in enumerate(out[:, 2:].split(n + 1, dim=1)):
                source = program.buffer(0)[:, head * step : head * step + k]
                assert torch.equal(part[:, :n], machine.linear(source, alone[head])), (rows, step, head)
                assert part[:, n].isnan().all()


@pytest.mark.parametrize("kind", list(BLOCK))
def test_embedding_of_quantized_rows(machine: Machine, kind: Kind) -> None:
    """The same numbers that a product with the identity gives."""
    depth = BLOCK[kind][0]
    packed = machine.pack(torch.from_numpy(random_blocks(kind, 21, depth)), kind, depth)
    ids = torch.tensor([20, 0, 7, 7, 16])
    program = Program((depth,), ROWS)
    program.buffer(0).fill_(NAN)
    program.embed(0, packed, 3.0)
    bench = Bench(machine)
    bench.program = program
    assert torch.equal(bench.run(0, ids), machine.linear(torch.eye(depth), packed).T[ids] * 3.0)


def test_rotation_leaves_values(bench: Bench) -> None:
    """Queries and keys are turned in place; the values behind them stay."""
    cache = LayerCache(1, 16, 1, 10, torch.float32)
    angles = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(ROWS, 1)  # a quarter turn of four entries
    bench.program.rotate_and_store(0, Heads(2, 0, 4), cache)
    bench.program.finish()
    batch = AttentionBatch.from_numpy(np.array([0, ROWS]), np.array([ROWS]), np.zeros((1, 1)), np.arange(ROWS))
    out = bench.program.run(bench._machine, torch.zeros(ROWS, dtype=torch.int64), batch, [angles], 0)
    for head in (0, 10, 20):
        assert torch.equal(out[:, head : head + 2], -bench.before[:, head + 2 : head + 4])
        assert torch.equal(out[:, head + 2 : head + 4], bench.before[:, head : head + 2])
        assert torch.equal(out[:, head + 4 : head + 10], bench.before[:, head + 4 : head + 10])
    assert torch.equal(out[:, 30:], bench.before[:, 30:])


def test_groups_of_layers_have_tables_of_their_own(machine: Machine) -> None:
    """Two layers over one cache, each with blocks of its own: what the second writes leaves the first as it was."""
    whole = LayerCache(2, 16, 1, 10, torch.float32)
    q_and_kv = torch.randn(2, ROWS, 30)
    outs = []
    for table, slots in (
        (np.array([[[0]], [[1]]]), np.arange(ROWS) + np.array([[0], [16]])),
        (np.array([[[1]], [[0]]]), np.arange(ROWS) + np.array([[16], [0]])),
    ):
        program = Program((30, 10, 30, 10), ROWS)
        program.buffer(0).copy_(q_and_kv[0])
        program.buffer(2).copy_(q_and_kv[1])
        for group in (0, 1):
            program.rotate_and_store(2 * group, Heads(1, 0, 0), whole.of_layer(group, whole.scales_2))
        for group in (0, 1):
            program.attention(2 * group, 2 * group + 1, 1, 1.0, None, None, whole.of_layer(group, whole.scales_2))
        program.finish()
        batch = AttentionBatch.from_numpy(np.array([0, ROWS]), np.array([ROWS]), table, slots)
        program.run(machine, torch.zeros(ROWS, dtype=torch.int64), batch, [torch.zeros(0)], 1)
        outs.append((program.buffer(1).clone(), program.buffer(3).clone()))
        with pytest.raises(AssertionError):  # one table for two groups would lead out of memory
            program.run(machine, torch.zeros(ROWS, dtype=torch.int64), batch.of_group(0), [torch.zeros(0)], 1)
        q_TNH, k_TGH, v_TGH = (part.unsqueeze(1) for part in q_and_kv[1].split(10, dim=1))
        cache = torch.zeros(REFERENCE.kv_cache_shape(2, 16, 1, 10))
        alone = batch.of_group(1)
        REFERENCE.write_kv(k_TGH, v_TGH, cache, alone.slot_mapping)
        torch.testing.assert_close(outs[-1][1], REFERENCE.paged_attention(q_TNH, cache, alone, 1.0).squeeze(1))
    assert all(torch.equal(one, other) for one, other in zip(*outs, strict=True))


@pytest.mark.parametrize("block_size", [1, 4, 16, 48])
@pytest.mark.parametrize("head_size", [1, 16, 33])
def test_a_cache_takes_what_it_says(block_size: int, head_size: int) -> None:
    for dtype in DTYPES.values():
        size = cache_bytes(block_size, 3, head_size, dtype) * 5
        assert sum(part.nbytes for part in LayerCache(5, block_size, 3, head_size, dtype).parts()) == size
        cache = torch.empty(cache_shape(5, block_size, 3, head_size, dtype), dtype=dtype)
        keys, values = LayerCache.view_of(cache, head_size).parts()
        assert cache.nbytes == keys.nbytes + values.nbytes == size


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("head_size", [16, 80, 144])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_projection_is_the_product_then_the_rotation(variant: str, threads: int, head_size: int, rows: int) -> None:
    """The same bits, of all heads at once or of a part of them, with norms and biases and without."""
    machine = Machine(threads, library_of(variant))
    queries, keys, depth = 3, 2, 40
    columns = (queries + 2 * keys) * head_size
    weight, bias, x = torch.randn(columns, depth), torch.randn(columns), torch.randn(rows, depth)
    angles = torch.randn(rows, 8)
    batch = AttentionBatch.from_numpy(
        np.array([0, rows]), np.array([rows]), np.zeros((1, 1)), np.random.default_rng(0).permutation(rows)
    )
    for norms in (False, True):
        q_norm, k_norm = (torch.randn(head_size) if norms else None for _ in range(2))
        heads = Heads(queries, 0, 8, q_norm, k_norm, 0.1)
        results = []
        for fused in (False, True):
            cache = LayerCache(-(-rows // 16), 16, keys, head_size, torch.bfloat16)
            program = Program((depth, columns), rows)
            program.buffer(0).copy_(x)
            program.buffer(1).fill_(NAN)
            for begin, end in ((0, queries * head_size), (queries * head_size, columns)):
                packed = machine.pack(weight[begin:end])
                part_bias = bias[begin:end] if norms else None
                if fused:
                    program.project(0, 1, packed, part_bias, heads, cache, offset=begin)
                else:
                    program.linear(0, 1, packed, part_bias, offset=begin)
            if not fused:
                program.rotate_and_store(1, heads, cache)
            program.finish()
            out = program.run(machine, torch.zeros(rows, dtype=torch.int64), batch, [angles], 1).clone()
            results.append((out, *cache.parts()))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
