"""What plain handle calls get, over a fake engine and the demo model's tokenizer."""

import asyncio
import dataclasses
import logging

import pytest

from rayllm.config.serve import FrontendSettings, RequestLogSettings
from rayllm.errors import ContextTooLong, RequestError
from rayllm.render.renderer import Renderer
from rayllm.render.tokenizer import Tokenizer
from rayllm.serving.fake import expected_output
from rayllm.serving.generation import Generator
from tests.models import smollm2_gguf

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def renderer():
    return Renderer(Tokenizer.load(str(smollm2_gguf())))


@pytest.fixture
def frontend():
    return FrontendSettings(
        model_path="m", served_model_names=("m",), tokenizer_path="m", max_model_len=100, vocab_size=49152,
        eos_token_ids=(2,), generation_defaults={"temperature": 0.5},
    )  # fmt: skip


@pytest.fixture
async def generator(service, renderer, frontend):
    return Generator(frontend, renderer, await service.start(interval_s=0.001))


async def test_the_whole_answer(generator, renderer):
    answer = await generator.generate("Hello there", {"max_tokens": 12})
    prompt = renderer.tokenize("Hello there")
    assert answer.prompt_tokens == len(prompt)
    assert answer.choices[0].token_ids == expected_output(prompt, 12)
    assert answer.text == renderer.detokenize(expected_output(prompt, 12), skip_special_tokens=True)
    assert answer.choices[0].finish_reason == "length"


async def test_pieces_join_to_the_whole(generator):
    pieces = [piece async for piece in generator.stream([5, 6, 7], {"max_tokens": 30})]
    whole = await generator.generate([5, 6, 7], {"max_tokens": 30})
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.choices[0].token_ids
    assert [piece.finish_reason for piece in pieces][-1] == "length"


async def test_several_choices(generator, service):
    answer = await generator.generate([5, 6, 7], {"max_tokens": 5, "n": 3, "seed": 11})
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    adds = service.engines["e1"].adds
    assert sorted(add.choice_index for add in adds) == [0, 1, 2]
    assert {add.sampling.seed for add in adds} == {11}
    assert {add.sampling.temperature for add in adds} == {0.5}


async def test_a_conversation_is_rendered(generator, service, renderer):
    messages = [{"role": "user", "content": "Hi"}]
    await generator.generate(messages, {"max_tokens": 1})
    assert service.engines["e1"].adds[0].prompt_token_ids == renderer.render_chat(messages, None, {})


async def test_without_max_tokens_the_context_is_the_limit(generator, service):
    async for _ in generator.stream([1] * 90):
        pass
    assert service.engines["e1"].adds[0].sampling.max_tokens == 10


async def test_a_stop_string_ends_the_answer_and_the_request(generator, service, helpers):
    whole = await generator.generate([5, 6, 7], {"max_tokens": 30})
    stop = whole.text[len(whole.text) // 2 :][:3]
    cut = await generator.generate([5, 6, 7], {"max_tokens": 30, "stop": [stop]})
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", stop)


async def test_who_leaves_early_ends_the_request(generator, service, helpers):
    pieces = generator.stream([5, 6, 7], {"max_tokens": 90})
    await anext(pieces)
    await pieces.aclose()
    await helpers.until(lambda: service.engines["e1"].load().running == 0)
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ("Hi", {"temperature": -1}, "temperature"),
        ("Hi", {"heat": 1}, "heat"),
        ("Hi", {"temperature": "warm"}, "sampling"),
        ([5, 49152], {}, "prompt"),
        ([5] * 100, {}, "prompt"),
        ([5] * 90, {"max_tokens": 20}, "max_tokens"),
    ],
)
async def test_bad_requests_are_named(generator, prompt, sampling, param):
    with pytest.raises(RequestError) as caught:
        await generator.generate(prompt, sampling)
    assert caught.value.param == param
    if param == "max_tokens":
        assert isinstance(caught.value, ContextTooLong)


async def test_drawn_seeds_repeat_with_the_server_s_seed(service, renderer):
    frontend = FrontendSettings(
        model_path="m", served_model_names=("m",), tokenizer_path="m", max_model_len=100, vocab_size=49152,
        eos_token_ids=(2,), seed=5,
    )  # fmt: skip
    fleet = await service.start(interval_s=0.001)
    for _ in range(2):
        again = Generator(frontend, renderer, fleet)
        for _ in range(3):
            await again.generate([5], {"max_tokens": 1})
    seeds = [add.sampling.seed for add in service.engines["e1"].adds]
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3


async def test_the_log_of_requests(service, renderer, frontend, caplog):
    caplog.set_level(logging.INFO, "rayllm.api")
    logged = dataclasses.replace(frontend, request_log=RequestLogSettings(outputs=True, deltas=False))
    generator = Generator(logged, renderer, await service.start(interval_s=0.001))
    answer = await generator.generate("Hello there", {"max_tokens": 4})
    request, output = caplog.messages
    id_ = service.engines["e1"].adds[0].external_id
    assert id_.startswith("handle-")
    assert f"request {id_}: 2 prompt tokens" in request
    assert repr(answer.text) in output


async def test_a_limit_of_the_server(service, renderer, frontend):
    limited = dataclasses.replace(frontend, generation_defaults={"max_tokens": 5})
    generator = Generator(limited, renderer, await service.start(interval_s=0.001))
    for sampling in ({}, {"max_tokens": 50}):
        assert len((await generator.generate([5, 6, 7], sampling)).choices[0].token_ids) == 5
