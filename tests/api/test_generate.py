"""`/inference/v1/generate`, and the endpoints that render requests for it."""

import pytest

from rayllm.api.fake import Script

from .conftest import events, ok, refused

GENERATE = "/inference/v1/generate"
SAY = [{"role": "user", "content": "hi"}]


async def generate(api, **body):
    return await api.post(GENERATE, **{"token_ids": [70, 71], **body})


async def test_plain(api):
    api.scripts(Script([[65], [66]], "stop"))
    body = ok(await generate(api, sampling_params={"max_tokens": 5}, return_token_ids=True))
    assert body["choices"] == [
        {"index": 0, "token_ids": [65, 66], "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert (body["prompt_token_ids"], body["usage"]["total_tokens"]) == ([70, 71], 4)
    assert api.service.adds[0].prompt_token_ids == [70, 71]


async def test_parameters(api):
    params = {"temperature": 0.5, "n": 2, "stop_token_ids": [9], "extra_args": {"a": 1}, "detokenize": False}
    ok(await generate(api, sampling_params=params, cache_salt="s", request_id="mine"))
    first, second = api.service.adds
    assert (first.sampling.temperature, first.sampling.stop_token_ids, second.choice_index) == (0.5, (9,), 1)
    assert (first.sampling.extra_args, first.cache_salt) == ({"a": 1}, "s")
    assert first.external_id.startswith("mine-")
    assert first.sampling.max_tokens == 62


async def test_streamed_equals_plain(api):
    api.scripts(Script([[65], [66], [67]], "stop"))
    options = {"include_usage": True}
    chunks = events(await generate(api, stream=True, stream_options=options, sampling_params={"logprobs": 1}))
    body = ok(await generate(api, sampling_params={"logprobs": 1}))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [i for choice in choices for i in choice["token_ids"]] == body["choices"][0]["token_ids"]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert entries == body["choices"][0]["logprobs"]["content"]
    assert entries[0] == {
        "token_id": 65, "logprob": -0.5, "rank": 1,
        "top_logprobs": [{"token_id": 65, "logprob": -0.5, "rank": 1}],
    }  # fmt: skip
    assert chunks[-1]["usage"] == body["usage"]


async def test_text(api):
    api.script("Hel", "lo")
    body = ok(await generate(api, output_mode="text", sampling_params={"stop": "l", "logprobs": 0}))
    assert (body["choices"][0]["text"], body["choices"][0]["stop_reason"]) == ("He", "l")
    assert body["choices"][0]["logprobs"]["content"][0]["bytes"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", []),
        ("token_ids", [-1]),
        ("token_ids", "hi"),
        ("token_ids", [10**6]),
        ("features", {}),
        ("output_mode", "audio"),
        ("sampling_params", {"temprature": 1}),
        ("sampling_params", {"prompt": "x"}),
        ("sampling_params", {"temperature": "x"}),
        ("stream_options", {"include_usage": True}),
    ],
)
async def test_refused(api, field, value):
    assert field in refused(await generate(api, **{field: value}))["message"]


async def test_too_long(api):
    assert refused(await generate(api, token_ids=[1] * 64))["code"] == "context_length_exceeded"


async def test_keys(make_api):
    refused(await generate(make_api(api_keys=("k",))), 401)


class TestRendering:
    async def test_a_conversation_gives_the_same(self, api):
        more = {"temperature": 0.5, "stop": ["x"], "max_tokens": 7, "logit_bias": {"5": 1}, "bad_words": ["the"],
                "cache_salt": "s", "seed": 3, "logprobs": True, "top_logprobs": 2}  # fmt: skip
        ok(await api.chat(**more))
        rendered = ok(
            await api.post("/v1/chat/completions/render", **more, messages=[{"role": "user", "content": "hi"}])
        )
        assert len(api.service.adds) == 1
        ok(await api.request("POST", GENERATE, json=rendered))
        first, second = api.service.adds
        assert (first.sampling, first.prompt_token_ids) == (second.sampling, second.prompt_token_ids)
        assert first.cache_salt == second.cache_salt

    async def test_texts_give_the_same(self, api):
        ok(await api.complete(prompt=["a", "b"], seed=1))
        rendered = ok(await api.post("/v1/completions/render", prompt=["a", "b"], seed=1))
        for request in rendered:
            ok(await api.request("POST", GENERATE, json=request))
        adds = api.service.adds
        assert [add.sampling for add in adds[:2]] == [add.sampling for add in adds[2:]]
        assert [add.prompt_token_ids for add in adds[:2]] == [add.prompt_token_ids for add in adds[2:]]

    async def test_other_apis_render_the_same(self, api):
        expected = ok(await api.post("/v1/chat/completions/render", messages=SAY, max_tokens=5, temperature=0.5))
        message = ok(await api.post("/v1/messages/render", messages=SAY, max_tokens=5, temperature=0.5))
        response = ok(await api.post("/v1/responses/render", input="hi", max_output_tokens=5, temperature=0.5))
        for rendered in (message, response):
            assert {**rendered, "request_id": ""} == {**expected, "request_id": ""}
        assert api.service.adds == []
        body = (await api.post("/v1/messages/render", messages=SAY, max_tokens=0)).json()
        assert body["type"] == "error"
        error = refused(await api.post("/v1/responses/render", input="hi", max_output_tokens=0))
        assert error["param"] == "max_output_tokens"

    async def test_no_seed_is_fixed(self, api):
        rendered = ok(await api.post("/v1/completions/render", prompt="a"))
        assert "seed" not in rendered[0]["sampling_params"]

    async def test_refused(self, api):
        assert refused(await api.post("/v1/chat/completions/render", messages=[]))["param"] == "messages"
        assert refused(await api.post("/v1/completions/render", prompt="a", n=0))["param"] == "n"
