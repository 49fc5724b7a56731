"""A model divided among ranks and stages is the model: logits, tokens, and the same bits whatever else is in a step."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rayllm.config.kv_cache import KvCacheSettings
from rayllm.config.load import load as config_load
from rayllm.config.parallel import ParallelSettings
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.weights import WeightsConfig
from rayllm.errors import ConfigError
from rayllm.kv.layout import group_layers
from rayllm.model.compiled import CompiledDecoder
from rayllm.model.decoder import Decoder
from rayllm.model.layers import Embedded
from rayllm.model.loader import own_parameters
from rayllm.model.moe import Held, HeldOf
from rayllm.model.sharded_state import Share, save_sharded_state
from rayllm.parallel.group import Group
from rayllm.parallel.ranks import Ranks
from rayllm.worker.worker import build_model
from rayllm_kernels import AttentionBatch
from rayllm_kernels.native.library import library
from tests.model.divided import divided, share
from tests.model.gguf_writer import write_gguf
from tests.model.runner import Runner, Sequence, all_logits, greedy
from tests.model.test_families import LENGTHS, tokens_of
from tests.models import TINY, make_tiny, smollm2_gguf

Tiny = Callable[[str], Path]
needs_kernels = pytest.mark.skipif(library() is None, reason="no C++ compiler here")
DIVISIONS = ((2, 1), (3, 1), (1, 2), (2, 2))
"""(ranks, stages)."""


class Whole:
    """What a model gives as a whole."""

    def __init__(self, path: Path, length: int, count: int, compiled: bool) -> None:
        self.path, self.compiled = path, compiled
        self.model = share(path, Ranks(), compiled)
        prompt = tokens_of(1, length)
        self.answer = greedy(self.model, prompt, count)
        self.tokens = prompt + self.answer
        self.logits = all_logits(self.model, self.tokens)

    def check(self, ranks: int, stages: int) -> None:
        """Divided, it gives the same: greedy tokens are what each of its own tokens is followed by."""
        with divided(self.path, ranks, stages, self.compiled) as model:
            got = all_logits(model, self.tokens, len(self.tokens) - 4)
        torch.testing.assert_close(got, self.logits, atol=2e-4, rtol=1e-4)
        assert got[-len(self.answer) - 1 : -1].argmax(-1).tolist() == self.answer, (ranks, stages)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_torch_decoders(tiny: Tiny, name: str) -> None:
    whole = Whole(tiny(name), min(30, LENGTHS.get(name, 30)), 10, compiled=False)
    for ranks, stages in DIVISIONS:
        whole.check(ranks, stages)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_compiled_decoders(tiny: Tiny, name: str) -> None:
    whole = Whole(tiny(name), min(30, LENGTHS.get(name, 30)), 10, compiled=True)
    for ranks, stages in DIVISIONS:
        whole.check(ranks, stages)


@needs_kernels
@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.long)])
def test_smollm2(compiled: bool) -> None:
    """Nine query heads, three of keys: 6 + 3, 3 + 3 + 3, 2 + 1 + 3 + 3."""
    whole = Whole(smollm2_gguf(), 20, 24, compiled)
    for ranks, stages in ((2, 1), (3, 1), (4, 1), (2, 2)) if compiled else ((2, 2),):
        whole.check(ranks, stages)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "ranks", "stages"), [("llama", 2, 1), ("mistral_window", 3, 1), ("olmo2", 3, 1), ("gemma2", 2, 2)]
)
def test_same_bits_alone_and_in_any_batch(tiny: Tiny, name: str, ranks: int, stages: int, dtype: torch.dtype) -> None:
    rng = random.Random(1)
    prompts = [tokens_of(seed, rng.choice((3, 40, 90))) for seed in range(4)]
    with divided(tiny(name), ranks, stages, compiled=True, dtype=dtype) as model:
        alone = [all_logits(model, prompt) for prompt in prompts]
        runner, sequences = Runner(model, len(prompts), 90), [Sequence(list(prompt)) for prompt in prompts]
        while work := [
            (row, sequence, min(rng.choice((1, 5, 60)), len(sequence.tokens) - sequence.computed))
            for row, sequence in enumerate(sequences)
            if sequence.computed < len(sequence.tokens)
        ]:
            runner.step(work)
    for sequence, wanted in zip(sequences, alone, strict=True):
        assert torch.equal(torch.stack(sequence.logits), wanted)


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_likeliest_is_the_first_of_the_largest(tiny: Tiny, name: str) -> None:
    """On whichever rank it lies, and where several ranks have equals."""
    with divided(tiny(name), 3, compiled=True) as model:
        hidden = [torch.randn(40, 48, generator=torch.Generator().manual_seed(0))] * 3
        assert torch.equal(model.likeliest(hidden), model.logits(hidden).argmax(-1))
        hidden = [torch.zeros(2, 48)] * 3
        assert model.likeliest(hidden).tolist() == [0, 0]


@needs_kernels
@pytest.mark.parametrize("name", ["gemma2", "granite"])
@pytest.mark.parametrize("compiled", [True, False])
def test_prompts_of_embeddings(tiny: Tiny, name: str, compiled: bool) -> None:
    """Take the place of tokens on every rank of the first stage."""
    rows = torch.randn(2, 48, generator=torch.Generator().manual_seed(0))
    embedded, tokens = Embedded(torch.tensor([1, 3]), rows), torch.tensor(tokens_of(1, 6))
    batch = AttentionBatch.from_numpy(np.array([0, 6]), np.array([6]), np.array([[1, 2]]), np.arange(4, 10))
    outputs = []
    for ranks, stages in ((1, 1), (2, 2)):
        with divided(tiny(name), ranks, stages, compiled) as model:
            hidden = model(tokens, torch.arange(6), batch, model.new_caches(3, 4), embedded)
            outputs.append(model.logits(hidden))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)


@needs_kernels
@pytest.mark.parametrize("compiled", [True, False])
def test_measured_scales_are_those_of_the_whole_model(tiny: Tiny, compiled: bool) -> None:
    """And layers that keep the model's type are told by their numbers in it."""
    settings = KvCacheSettings(dtype="fp8_e4m3", kept_layers=frozenset({1}), measures_scales=True)
    whole, tokens = share(tiny("llama"), Ranks(), compiled, kv_cache=settings), tokens_of(1, 30)
    wanted = all_logits(whole, tokens)
    with divided(tiny("llama"), 2, 2, compiled, kv_cache=settings) as model:
        got = all_logits(model, tokens)
        assert [spec.dtype for stage in model.stages for spec in stage[1].cache_specs()] == [
            spec.dtype for spec in whole.cache_specs()
        ]
        for rank in range(2):
            scales = [pair for stage in model.stages for pair in stage[rank].kv_scales()]
            torch.testing.assert_close(torch.tensor(scales), torch.tensor(whole.kv_scales()), rtol=1e-4, atol=0)
    # Sums of ranks differ in their last bits, which may round a key otherwise.
    assert torch.nn.functional.cosine_similarity(got, wanted, dim=-1).min() > 0.999


def test_caches_of_a_stage(tiny: Tiny) -> None:
    """Its own layers' alone, shared by the groups that these belong to; tables of blocks are those of all stages."""
    windows = (6, 6, 6, 6, 6, None)
    layout = group_layers(windows, 100)
    assert layout.groups == ((5,), (0,), (1,), (2,), (3,), (4,))
    whole = share(tiny("gemma3"), Ranks(), layout=layout)
    for stage in range(2):
        model = share(tiny("gemma3"), Ranks(stage=stage, stages=2), layout=layout)
        assert isinstance(model, Decoder)
        assert model.layout.width == layout.width
        assert model.cache_specs() == whole.cache_specs()[3 * stage : 3 * stage + 3]
        caches = model.new_caches(5, 4)
        assert len(caches) == 3
        assert len({cache.data_ptr() for cache in caches}) == 1
        assert model.cache_bytes(4) == whole.cache_bytes(4)


@needs_kernels
def test_layers_that_share_blocks(tiny: Tiny) -> None:
    """Of stages as of the whole model, with a table of blocks for each group."""
    layout = group_layers((6, 6, 6, 6, 6, None), 100)
    tokens = torch.tensor(tokens_of(1, 16))
    table_GBN = np.arange(1, 1 + 6 * 4, dtype=np.int32).reshape(6, 1, 4)
    slots_GT = (table_GBN[..., None] * 4 + np.arange(4)).reshape(6, 16)
    batch = AttentionBatch.from_numpy(np.array([0, 16]), np.array([16]), table_GBN, slots_GT)
    outputs = []
    for stages in (1, 2):
        with divided(tiny("gemma3"), 2, stages, compiled=True, layout=layout) as model:
            outputs.append(model.logits(model(tokens, torch.arange(16), batch, model.new_caches(25, 4))))
    assert torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(
        outputs[0], all_logits(share(tiny("gemma3"), Ranks(), True), tokens.tolist()), atol=2e-4, rtol=1e-4
    )


@needs_kernels
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("inner", [128, 96])
def test_quantized_weights(tmp_path: Path, kind: str, inner: int) -> None:
    """Stay as they are stored where a rank's columns are whole blocks, as half of 128 are, and 48 are not."""
    folder = make_tiny("llama_biases", tmp_path / "model", hidden_size=96, intermediate_size=inner, head_dim=32)
    file = write_gguf(folder, tmp_path / "model.gguf", "llama", kind)
    tokens = tokens_of(1, 40)
    wanted = all_logits(share(file, Ranks(), compiled=True), tokens)
    for ranks, stages in ((2, 1), (3, 1), (2, 2)):
        with divided(file, ranks, stages, compiled=True) as model:
            torch.testing.assert_close(all_logits(model, tokens), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_finished_shares(tiny: Tiny, tmp_path: Path, ranks: int) -> None:
    """Hold what each rank would have read, for all stages, which take their own layers."""
    engine = config_load(parse_arguments([str(tiny("olmo2")), "--dtype", "float32"], registry())).engine
    save_sharded_state(replace(engine, parallel=ParallelSettings(tensor=ranks)), tmp_path)
    for rank in range(ranks):
        for stage in range(2):
            place = Ranks(Share(rank, ranks), stage, 2)
            read, wanted = (
                dict(own_parameters(share(path, place, weights=weights)))
                for path, weights in ((tiny("olmo2"), None), (tmp_path, WeightsConfig(format="sharded_state")))
            )
            assert read.keys() == wanted.keys()
            assert all(torch.equal(read[name], wanted[name]) for name in read)


def test_random_weights_are_the_same_however_divided(tiny: Tiny) -> None:
    tokens, dummy = tokens_of(1, 20), {"weights": WeightsConfig(format="dummy"), "seed": 5}
    wanted = all_logits(share(tiny("llama_biases"), Ranks(), **dummy), tokens)
    with divided(tiny("llama_biases"), 2, 2, **dummy) as model:
        torch.testing.assert_close(all_logits(model, tokens), wanted, atol=1e-5, rtol=1e-4)


def test_ranks_that_cannot_divide(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size: 7 ranks cannot divide 6 query heads"):
        share(tiny("llama"), Ranks(Share(0, 7)))
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size: 4 stages cannot divide 3 layers"):
        share(tiny("llama"), Ranks(stage=3, stages=4))


@pytest.mark.parametrize("ranks", [4, 6])
def test_any_rank_has_a_head(tiny: Tiny, ranks: int) -> None:
    """Up to as many ranks as query heads."""
    whole = Whole(tiny("qwen3"), 20, 5, compiled=False)
    whole.check(ranks, 1)


def build(path: Path, place: Ranks, *flags: str) -> Any:
    engine = config_load(parse_arguments([str(path), "--dtype", "float32", *flags], registry())).engine
    return build_model(engine, torch.device("cpu"), place)


@needs_kernels
def test_which_decoder_is_built(tiny: Tiny) -> None:
    """The compiled one, for a share as for the whole."""
    for place in (Ranks(Share(1, 2)), Ranks(stage=1, stages=2)):
        assert isinstance(build(tiny("llama"), place), CompiledDecoder)
        assert isinstance(build(tiny("llama"), place, "--attention-backend", "torch"), Decoder)


@pytest.mark.parametrize("option", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_models_of_transformers_are_not_divided(tiny: Tiny, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: GPTNeoXForCausalLM runs by the code of transformers"):
        build(tiny("gpt_neox"), Ranks(), option, "2")


class Dealt:
    """The experts of a rank, where ranks take turns, and each has the tokens of all."""

    def __init__(self, group: Group, experts: int) -> None:
        self._group, self.logical = group, list(range(group.rank, experts, group.size))

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mine_TK = ids_TK % self._group.size == self._group.rank
        return x_TD, torch.where(mine_TK, ids_TK // self._group.size, -1), weights_TK

    def combine(self, y_SD: Tensor) -> Tensor:
        return self._group.all_reduce(y_SD)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_experts_that_ranks_hold_whole(tiny: Tiny, name: str, compiled: bool) -> None:
    """Beside attention and shared experts that they divide."""
    path = tiny(name)
    whole, prompt = share(path, Ranks(), compiled), tokens_of(1, 45)
    count = whole.spec.moe.num_experts if whole.spec.moe is not None else 0

    def held(group: Group) -> HeldOf:
        def of_layer(layer: int) -> Held:
            dealt = Dealt(group, count)
            return Held(dealt.logical, dealt)

        return of_layer

    with divided(path, 2, 1, compiled, held=held) as model:
        torch.testing.assert_close(all_logits(model, prompt, 7), all_logits(whole, prompt), atol=2e-4, rtol=1e-4)
