"""Estimated work equals a count of the products, and grows with the tokens."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rayllm.config.model_facts import read_model_facts
from rayllm.engine.work import FLOPS, READ, WRITTEN, Work, tokens_kept, tokens_seen
from rayllm.model.families import spec_of
from rayllm.model.loader import load_model
from rayllm.serving.metrics import prometheus_text
from tests.model.runner import Runner, Sequence
from tests.models import make_tiny

from .conftest import make_add, make_config

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 30, 31, 7, 60, 61, 62, 11, 4, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made: dict[str, Path] = {}

    def make(name):
        if name not in made:
            made[name] = make_tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


def counted(folder, tokens):
    """Operations of transformers' products for these tokens, one at a time over its own cache."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    cache, counter = transformers.DynamicCache(config=model.config), FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        for token in tokens:
            model(torch.tensor([[token]]), cache=cache, use_cache=True)
    by_module = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    rotations = sum(flops for name, flops in by_module.items() if name.endswith("rotary_emb"))
    return by_module["Global"] - rotations


def estimated(bench, folder, prompt, max_tokens, **changes):
    facts = dataclasses.replace(read_model_facts(str(folder)), eos_token_ids=())
    one = bench(model=facts, estimate_work=True, async_scheduling=False, **changes)
    one.run(make_add(1, prompt, max_tokens))
    return one.engine.stats(), one.outputs[0, 1]


@pytest.mark.option("enable-mfu-metrics")
@pytest.mark.parametrize("name", ["llama_tied", "mistral_window", "gemma3"])
def test_operations_are_those_of_the_products(bench, model, name):
    folder, outputs = model(name), 12
    stats, _ = estimated(bench, folder, PROMPT[:1], outputs)
    tokens = [PROMPT[0]] * outputs  # which ones does not matter
    assert stats.estimates[FLOPS] == counted(folder, tokens)


@pytest.mark.option("enable-mfu-metrics")
@pytest.mark.parametrize("name", ["deepseek2", "deepseek2_lite"])
def test_operations_of_latent_attention(bench, model, name):
    """Those of our own decoder, as others widen what is cached; over blocks of a token, which leave none to pad."""
    folder, outputs = model(name), 12
    stats, _ = estimated(bench, folder, PROMPT[:1], outputs)
    decoder = load_model(read_model_facts(str(folder)), torch.float32, torch.device("cpu"))
    runner, sequence = Runner(decoder, 1, outputs, block_size=1), Sequence([PROMPT[0]] * outputs)
    with FlopCounterMode(display=False) as counter:
        for _ in range(outputs):
            runner.step([(0, sequence, 1)])
    spec = spec_of(read_model_facts(str(folder)))
    alone = 2 * spec.num_layers * spec.num_heads * spec.mla.kv_lora_rank  # what a lone token sees is no product
    assert stats.estimates[FLOPS] == counter.get_total_flops() + alone
    assert stats.estimates[WRITTEN] == outputs * spec.num_layers * spec.head_size * 4


@pytest.mark.option("enable-mfu-metrics")
def test_chunks_change_reads_only(bench, model):
    folder = model("llama_tied")
    spec = spec_of(read_model_facts(str(folder)))
    whole, _ = estimated(bench, folder, PROMPT, 1)
    cut, _ = estimated(bench, folder, PROMPT, 1, max_num_batched_tokens=4)
    assert cut.estimates[FLOPS] == whole.estimates[FLOPS]
    assert cut.estimates[WRITTEN] == whole.estimates[WRITTEN]
    kv = 2 * spec.num_kv_heads * spec.head_size * 4
    assert whole.estimates[WRITTEN] == len(PROMPT) * spec.num_layers * kv
    layers = spec.num_layers * spec.hidden_size * (
        2 * (spec.num_heads + spec.num_kv_heads) * spec.head_size + 3 * spec.intermediate_size
    )  # fmt: skip
    read = 4 * (layers + spec.hidden_size * spec.vocab_size) + len(PROMPT) * spec.num_layers * kv
    assert whole.estimates[READ] == read
    assert cut.estimates[READ] == read + 2 * 4 * layers + (4 + 8) * spec.num_layers * kv


@pytest.mark.option("enable-mfu-metrics")
def test_the_counters_show_only_when_asked_for(bench, model):
    stats, _ = estimated(bench, model("llama_tied"), PROMPT, 3)
    shown = prometheus_text({"e": stats}, "m").decode()
    for name in (FLOPS, READ, WRITTEN):
        assert f'vllm:{name}_total{{engine="0",model_name="m"}} ' in shown
    one = bench()
    one.run(make_add(1, PROMPT, 3))
    assert "estimated" not in prometheus_text({"e": one.engine.stats()}, "m").decode()


def test_prompt_logprobs_take_logits_of_the_prompt(bench, model):
    folder = model("llama_tied")
    facts = dataclasses.replace(read_model_facts(str(folder)), eos_token_ids=())
    totals = []
    for more in ({}, {"prompt_logprobs": 1}):
        one = bench(model=facts, estimate_work=True, max_num_batched_tokens=4)
        one.run(make_add(1, PROMPT, 1, **more))
        totals.append(one.engine.stats().estimates[FLOPS])
    spec = spec_of(facts)
    assert totals[1] - totals[0] == (len(PROMPT) - 1) * 2 * spec.hidden_size * spec.vocab_size


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_what_tokens_see_is_a_sum(window):
    for start in range(6):
        for count in range(1, 6):
            ends = range(start + 1, start + count + 1)
            seen = [range(max(0, end - (window or end)), end) for end in ends]
            assert tokens_seen(start, count, window) == sum(map(len, seen))
            assert tokens_kept(start, count, window) == len(set().union(*seen))


def test_weights_of_a_gguf_count_as_stored(model):
    facts = read_model_facts(str(model("llama_tied")))
    stored = dataclasses.replace(facts, format="gguf")
    plain = Work(make_config(model=facts))._weight_bytes
    assert plain == 4
    half = Work(make_config(model=stored, weight_bytes=1000))._weight_bytes
    assert half * (Work(make_config(model=facts))._layers + 48 * 99) == pytest.approx(1000)
