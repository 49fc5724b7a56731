"""Ranges of sampling parameters over HTTP."""

import json

import pytest

from .conftest import ok, refused

BAD = [
    ("temperature", [-0.1, 2.1, "0.5", True, [], 1e300]),
    ("top_p", [0, -0.1, 1.1]),
    ("top_k", [-2, 1.5]),
    ("min_p", [-0.1, 1.1]),
    ("presence_penalty", [2.5, -2.1]),
    ("frequency_penalty", [2.5, -2.1]),
    ("repetition_penalty", [0, -1]),
    ("n", [0, -1, 1.5, 10_000]),
    ("max_tokens", [-1, 1.5, 2**70]),
    ("min_tokens", [-1, 17]),
    ("seed", [2**63, -(2**63) - 1, 0.5]),
    ("stop", ["", [""], ["x"] * 100, ["x" * 5000], [1], 5]),
    ("stop_token_ids", [[-1], ["a"], [10**6], [2**70]]),
    ("allowed_token_ids", [[], [-1], [10**6]]),
    ("logit_bias", [{"-1": 5}, {"abc": 1}, {"1000000": 5}, {"5": 101}, {"5": -101}, {" 5": 1}, {"٣": 1}, [1]]),
    ("bad_words", [[""], "word", [1]]),
    ("prompt_logprobs", [-1, 21]),
    ("stream", ["yes", 1]),
    ("stream_options", [{"include_usage": 1}, {"other": True}]),
    ("vllm_xargs", [[1], {"a": {"b": 1}}]),
    ("priority", [1.5, "x"]),
]
GOOD = {
    "temperature": [0, 2, 1.0],
    "top_p": [1, 0.01],
    "top_k": [-1, 0, 5, 10**9],
    "presence_penalty": [-2, 2],
    "n": [1, 3],
    "seed": [2**63 - 1, -(2**63), 0],
    "stop": ["x", ["x", "y"]],
    "logit_bias": [{"5": 100}, {"5": -100.0}, {}],
    "min_tokens": [0, 16],
    "ignore_eos": [True],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD for value in values])
async def test_out_of_range(api, field, value):
    more = {"stream": True} if field == "stream_options" else {}
    error = refused(await api.complete(**{field: value}, **more))
    assert error["param"] == field
    assert field in error["message"]
    assert api.service.adds == []


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD.items() for value in values])
async def test_in_range(api, field, value):
    ok(await api.complete(**{field: value}))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_none(api, number):
    body = '{"model": "tiny", "prompt": "a", "temperature": NUMBER}'.replace("NUMBER", number)
    refused(await api.request("POST", "/v1/completions", content=body))


async def test_neutral_values_equal_omitted_ones(api):
    ok(await api.complete(seed=1))
    ok(await api.complete(seed=1, presence_penalty=0, frequency_penalty=0, repetition_penalty=1.0, top_p=1, top_k=0))
    first, second = (add.sampling for add in api.service.adds)
    assert first == second


async def test_every_field_of_every_request_is_described_once():
    from rayllm.api.wire import REFUSED, ChatRequest, CompletionRequest

    for kind, own in ((ChatRequest, {"store"}), (CompletionRequest, {"prompt_embeds"})):
        assert set(kind.model_fields) & set(REFUSED) == own, "what only one of them honours, the other refuses"
    json.dumps(sorted(REFUSED))
