"""Prompts as embeddings: the rows of tokens give what the tokens give, whatever else runs and however it is cut."""

import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from rayllm.config.load import load
from rayllm.config.model_facts import read_model_facts
from rayllm.config.parser import parse_mapping
from rayllm.config.registry import registry
from rayllm.errors import RequestError
from rayllm.kv.layout import group_layers
from rayllm.messages.engine import Add, Embeds
from rayllm.messages.sampling import SamplingParams
from tests.models import make_tiny

from .test_engine_on_model import Runner, make_adds

pytestmark = pytest.mark.slow

Rows = Callable[[list[int]], bytes]
MODELS = ("llama", "gemma3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tiny(name, tmp_path_factory.mktemp(name)) for name in MODELS}


def rows_of(folder: Path) -> Rows:
    """Token ids to the file of `torch.save` that a client of transformers would send."""
    facts = read_model_facts(str(folder))
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    if "Gemma" in facts.architecture:
        table = table * torch.tensor(facts.config["hidden_size"] ** 0.5)

    def get(ids: list[int]) -> bytes:
        file = io.BytesIO()
        torch.save(table[ids], file)
        return file.getvalue()

    return get


def embedded(adds: list[Add], rows: Rows) -> list[Add]:
    return [
        Add(
            request_id=add.request_id + 1000, prompt_token_ids=[0] * len(add.prompt_token_ids),
            prompt_embeds=(Embeds(0, rows(add.prompt_token_ids)),), sampling=add.sampling,
            choice_index=add.choice_index, arrival_time=0.0,
        )
        for add in adds
    ]  # fmt: skip


def partly_embedded(adds: list[Add], rows: Rows) -> list[Add]:
    """Every other third of the prompts as embeddings, those next to each other in two files."""
    made = []
    for add in adds:
        ids = list(add.prompt_token_ids)
        size = max(1, len(ids) // 3)
        cuts = [(at, min(at + size, len(ids))) for at in (0, 2 * size) if at < len(ids)]
        middle = [((a + b) // 2) for a, b in cuts]
        pieces = [(a, m) for (a, _), m in zip(cuts, middle, strict=True) if a < m]
        pieces = sorted(pieces + [(m, b) for (_, b), m in zip(cuts, middle, strict=True) if m < b])
        embeds = tuple(Embeds(a, rows(ids[a:b])) for a, b in pieces)
        for a, b in pieces:
            ids[a:b] = [0] * (b - a)
        made.append(msgspec.structs.replace(
            add, request_id=add.request_id + 2000, prompt_token_ids=ids, prompt_embeds=embeds
        ))  # fmt: skip
    return made


def without_prompt_penalty() -> list[Add]:
    return [add for add in make_adds() if add.sampling.repetition_penalty == 1.0]


@pytest.mark.option("enable-prompt-embeds")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"num_blocks": 41, "max_num_batched_tokens": 7}),
        ("llama", {"attention_backend": "torch"}),
        ("gemma3", {"kv_layout": group_layers([None if i == 5 else 6 for i in range(6)], 160), "num_blocks": 60,
                    "max_num_batched_tokens": 7, "reserve_whole_prompt": False}),
        ("gemma3", {"attention_backend": "torch", "max_num_batched_tokens": 16}),
    ],
    ids=["compiled", "torch", "scaled", "scaled_torch"],
)  # fmt: skip
def test_rows_of_tokens_are_those_tokens(folders: dict[str, Path], name: str, changes: dict[str, object]) -> None:
    """Beside prompts of tokens, in pieces, preempted, and with a warm cache."""
    runner = Runner(read_model_facts(str(folders[name])), prompt_embeds=True, **changes)
    adds = without_prompt_penalty()
    if changes.get("attention_backend") == "torch":
        adds = adds[:5]  # each of its steps takes long
    alike = embedded(adds, rows_of(folders[name]))
    partly = partly_embedded(adds, rows_of(folders[name]))
    mixed = [one for three in zip(adds, alike, partly, strict=True) for one in three]
    for _ in range(2):
        tokens = runner.run(mixed)
        assert tokens[::3] == tokens[1::3] == tokens[2::3]
    for _ in range(2):
        assert runner.run([alike[3], partly[3]]) == [tokens[9]] * 2, "alone"
    stats = runner.engine.stats()
    assert stats.prefix_hits > 0
    if "num_blocks" in changes:
        assert stats.preemptions > 0
    runner.close()


def test_a_model_of_transformers_takes_them(folders: dict[str, Path]) -> None:
    options = {
        "model": str(folders["llama"]), "model_impl": "transformers", "dtype": "float32", "max_model_len": 160,
        "kv_cache_memory_bytes": "16M", "enable_prompt_embeds": True, "skip_tokenizer_init": True,
    }  # fmt: skip
    config = load(registry().values(parse_mapping(options, registry()))).engine
    runner = Runner(config.model, config)
    adds = without_prompt_penalty()[:4]
    assert runner.run(embedded(adds, rows_of(folders["llama"]))) == runner.run(adds)
    runner.close()


def test_the_cache_knows_them_by_content(folders: dict[str, Path]) -> None:
    runner = Runner(read_model_facts(str(folders["llama"])), prompt_embeds=True)
    rows = rows_of(folders["llama"])
    sampling = SamplingParams(temperature=0.0, max_tokens=8)

    def ask(number: int, ids: list[int] | None, *embeds: bytes, at: int = 0) -> tuple[list[int], int | None]:
        add = Add(
            request_id=number, prompt_token_ids=ids or [0] * 20, sampling=sampling,
            prompt_embeds=tuple(Embeds(at, one) for one in embeds),
            arrival_time=0.0,
        )  # fmt: skip
        (tokens,) = runner.run([add])
        return tokens, runner.outputs[number][0].cached_tokens

    one, other = list(range(3, 23)), list(range(23, 43))
    first, second = ask(1, None, rows(one)), ask(2, None, rows(other))
    assert (first[1], second[1]) == (0, 0)
    assert first[0] != second[0]
    assert ask(3, None, rows(one)) == (first[0], 16)
    assert ask(4, [0] * 20)[1] == 0, "the tokens that stand for embeddings are not those"
    assert ask(5, [0] * 21, rows(one), at=1)[1] == 0, "nor those that stand elsewhere"
    runner.close()


def test_those_that_cannot_be_used_are_refused(folders: dict[str, Path]) -> None:
    facts = read_model_facts(str(folders["llama"]))
    rows = rows_of(folders["llama"])([5, 6, 7])
    plain = SamplingParams(temperature=0.0, max_tokens=4)

    def add(embeds: bytes, sampling: SamplingParams = plain, tokens: int = 3) -> Add:
        return Add(
            request_id=1, prompt_token_ids=[0] * tokens, prompt_embeds=(Embeds(0, embeds),), sampling=sampling,
            arrival_time=0.0,
        )  # fmt: skip

    def placed(tokens: int, *at: int) -> Add:
        return msgspec.structs.replace(add(rows, tokens=tokens), prompt_embeds=tuple(Embeds(i, rows) for i in at))

    closed = Runner(facts)
    with pytest.raises(RequestError, match="--enable-prompt-embeds"):
        closed.engine.add(0, add(rows))
    closed.close()
    runner = Runner(facts, prompt_embeds=True)
    for wrong, param in (
        (add(rows, tokens=2), "prompt_embeds"),
        (placed(6, 0, 2), "prompt_embeds"),
        (placed(6, 3, 0), "prompt_embeds"),
        (placed(6, -1), "prompt_embeds"),
        (add(b"x"), "prompt_embeds"),
        (add(rows, SamplingParams(temperature=0.0, prompt_logprobs=1)), "prompt_logprobs"),
        (add(rows, SamplingParams(temperature=0.0, repetition_penalty=1.1)), "repetition_penalty"),
    ):
        with pytest.raises(RequestError) as caught:
            runner.engine.add(0, wrong)
        assert caught.value.param == param
    assert runner.run([add(rows)]), "the engine goes on"
    runner.close()
