"""Groups of layers with a window: they hold what their window sees and no more, and no token changes for it."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from rayllm.config.model_facts import ModelFacts
from rayllm.errors import ConfigError
from rayllm.kv.layout import KVLayout, group_layers
from tests.engine.conftest import Bench, make_add
from tests.engine.options import FACTS, Stepper, config_of, resolved
from tests.engine.test_engine import expected, random_prompts

pytestmark = pytest.mark.slow

Make = Callable[..., Bench]
LAYOUTS = {
    "mixed": group_layers([6, 6, None], 128),
    "wide": group_layers([20, None, 20, None], 128),
    "one": group_layers([1, None], 128),
    "all": group_layers([6, 6], 128),
}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"async_scheduling": False}, {"max_partial_prefills": 3}, {"scarce": True}])
def test_tokens_do_not_depend_on_windows(bench: Make, name: str, caching: bool, changes: dict[str, object]) -> None:
    layout = LAYOUTS[name]
    need = layout.most_blocks(128, 23, 4)
    scarce = bool(changes.get("scarce"))
    bench_ = bench(
        num_blocks=need if scarce else 2 * need, max_num_batched_tokens=23, max_num_seqs=7, kv_layout=layout,
        enable_prefix_caching=caching, reserve_whole_prompt=not scarce,
        **{key: value for key, value in changes.items() if key != "scarce"},
    )  # fmt: skip
    rng = random.Random(1)
    adds = [make_add(i, p, rng.randint(1, 60), priority=rng.randint(0, 3)) for i, p in enumerate(random_prompts(60))]
    for add, tokens in zip(adds, bench_.run(*adds), strict=True):
        assert tokens == expected(add.prompt_token_ids, add.sampling.max_tokens)
    stats = bench_.engine.stats()
    assert (stats.prefix_hits > 0) == caching
    assert stats.preemptions > 0 or not scarce or name == "all"


def gemma(**config: object) -> ModelFacts:
    return replace(
        FACTS, architecture="Gemma2ForCausalLM",
        config={
            **FACTS.config, "intermediate_size": 64, "vocab_size": 1000, "head_dim": 16, "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 16, "sliding_window": 32, "num_hidden_layers": 4, "max_position_embeddings": 512,
            "hidden_activation": "gelu_pytorch_tanh", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            **config,
        },
    )  # fmt: skip


def test_blocks_that_left_the_window_are_given_back() -> None:
    one = Stepper("--max-num-batched-tokens", "64", facts=gemma())
    one.add(make_add(0, list(range(1, 300)), 100))
    most = 0
    while one.step():
        most = max(most, one.pool.stats().held)
    assert most == 25 + 3, "all 399 tokens, and 32 of them wherever they begin"
    assert one.tokens[0] == expected(list(range(1, 300)), 100)
    assert one.pool.stats().held == 0


def test_a_prefix_needs_of_windows_only_its_end() -> None:
    one = Stepper(facts=gemma())
    prompt = list(range(1, 130))
    one.run([make_add(0, prompt, 1)])
    layout, pool = one.scheduler.limits.layout, one.pool
    names = [name for name in pool._block_of if name.endswith(b"\1") and len(name) == 33]
    assert len(names) == 8
    for name in names[:6]:  # what lies before the window
        forget(one, name)
    assert one.run([make_add(1, prompt, 1)])[0] == {1: 1}
    assert layout.first_seen(128, 16) == 6
    forget(one, names[7])  # the end of the prefix; those before it are known with their windows no more
    assert one.run([make_add(2, prompt, 1)])[0] == {2: 129}
    assert one.tokens[0] == one.tokens[1] == one.tokens[2] == expected(prompt, 1)


def forget(one: Stepper, name: bytes) -> None:
    """Give up the content of a cached block, as if it had been taken for something else."""
    pool = one.pool
    block = pool._block_of[name]
    pool._cached.move_to_end(block, last=False)
    taken = pool.take(pool.stats().empty + 1)
    assert taken is not None
    assert block in taken
    pool.give_back(taken)
    pool.check()


@pytest.mark.option("disable-hybrid-kv-cache-manager")
def test_layers_are_alike_on_demand_or_where_windows_save_nothing() -> None:
    layout = config_of(facts=gemma()).kv_layout
    assert (layout.groups, layout.window) == (((1, 3), (0, 2)), 32)
    assert config_of("--no-disable-hybrid-kv-cache-manager", facts=gemma()).kv_layout == layout
    assert config_of("--disable-hybrid-kv-cache-manager", facts=gemma()).kv_layout == KVLayout()
    assert config_of("--max-model-len", "32", facts=gemma()).kv_layout == KVLayout()
    assert config_of(facts=replace(gemma(), windows=False)).kv_layout == KVLayout()
    assert config_of().kv_layout == KVLayout()
    (note,) = resolved("--no-disable-hybrid-kv-cache-manager").notes
    assert note.startswith("--no-disable-hybrid-kv-cache-manager has no effect: ")


@pytest.mark.option("disable-hybrid-kv-cache-manager")
def test_the_same_memory_holds_longer_requests() -> None:
    flags = ("--max-num-batched-tokens", "32", "--max-model-len", "auto")
    size = ("--kv-cache-memory-bytes", str(2 * 2 * 16 * 4 * 4 * 20 * 16))  # 20 blocks of all 4 layers
    assert config_of(*flags, *size, "--disable-hybrid-kv-cache-manager", facts=gemma()).max_model_len == 20 * 16
    assert config_of(*flags, *size, facts=gemma()).max_model_len == (40 - 5) * 16 - 48
    blocks = ("--num-gpu-blocks-override", "37")
    assert config_of("--max-num-batched-tokens", "32", *blocks, facts=gemma()).max_model_len == 512
    with pytest.raises(ConfigError, match=r"--num-gpu-blocks-override.*--max-model-len to 496"):
        config_of("--max-num-batched-tokens", "32", "--num-gpu-blocks-override", "36", facts=gemma())
