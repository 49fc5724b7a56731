"""`/v1/chat/completions/batch`."""

import pytest

from rayllm.api.fake import Script

from .conftest import ok, refused

BATCH = "/v1/chat/completions/batch"
HI, HO = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]


async def batch(api, **body):
    return await api.post(BATCH, **{"messages": [HI, HO], **body})


async def test_each_conversation_has_its_choices(api):
    api.scripts(*(Script([api.ids(text)]) for text in "abcd"))
    body = ok(await batch(api, n=2, temperature=0.5, max_tokens=9))
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == list(enumerate("abcd"))
    prompts = [api.tokenizer.decode(add.prompt_token_ids, False) for add in api.service.adds]
    assert prompts == ["<|user|>hi<|end|><|assistant|>"] * 2 + ["<|user|>ho<|end|><|assistant|>"] * 2
    assert body["usage"]["prompt_tokens"] == sum(len(add.prompt_token_ids) for add in api.service.adds[::2])
    assert {add.sampling.temperature for add in api.service.adds} == {0.5}


@pytest.mark.parametrize(
    ("field", "value"),
    [("messages", []), ("messages", HI), ("messages", [HI, []]), ("stream", True), ("tools", [{}]), ("n", 0)],
)
async def test_refused(api, field, value):
    assert field in refused(await batch(api, **{field: value}))["message"]
    assert api.service.adds == []


async def test_too_many(api):
    assert refused(await batch(api, messages=[HI] * 100, n=100))["param"] == "n"
