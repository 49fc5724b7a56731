"""Chat completions that are stored, with OpenAI's own client."""

import openai
import pytest

from rayllm.api.fake import Script

from .conftest import MODEL, Harness, refused
from .test_responses import client_of

SAY = [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "there"}]}]


@pytest.fixture
async def client(api: Harness):
    async with client_of(api) as client:
        yield client


async def create(client, **more):
    return await client.chat.completions.create(**{"model": MODEL, "messages": SAY, "store": True, **more})


async def test_retrieve(client):
    made = await create(client, metadata={"a": "b"}, n=2)
    kept = await client.chat.completions.retrieve(made.id)
    assert (kept.metadata, kept.choices, kept.usage) == ({"a": "b"}, made.choices, made.usage)


@pytest.mark.parametrize("tools", [{}, {"reasoning_parser": "deepseek_r1"}])
async def test_streams_are_kept_as_wholes(make_api, tools):
    api = make_api(**tools)
    api.scripts(*(Script([api.ids(c) for c in text], "stop") for text in ("hm</think>abc", "x", "hm</think>abc", "x")))
    async with client_of(api) as client:
        chunks = [chunk async for chunk in await create(client, stream=True, n=2)]
        whole = await create(client, n=2)
        kept = await client.chat.completions.retrieve(chunks[0].id)
        assert [choice.message for choice in kept.choices] == [choice.message for choice in whole.choices]
        assert (kept.usage, kept.object) == (whole.usage, "chat.completion")


async def test_messages(client):
    made = await create(client)
    messages = [message async for message in client.chat.completions.messages.list(made.id, limit=1)]
    assert [(one.id, one.role, one.content) for one in messages] == [
        (f"{made.id}-0", "user", "hi"), (f"{made.id}-1", "user", None)
    ]  # fmt: skip
    assert messages[1].content_parts[0].text == "there"


async def test_list(client):
    ids = [(await create(client, metadata={"n": str(i % 2)})).id for i in range(4)]
    await client.chat.completions.retrieve(ids[0])
    for query, wanted in (
        ({}, ids),
        ({"limit": 3}, ids),
        ({"order": "desc"}, ids[::-1]),
        ({"metadata": {"n": "1"}}, ids[1::2]),
        ({"model": "other"}, []),
        ({"model": MODEL, "after": ids[1]}, ids[2:]),
    ):
        assert [one.id async for one in client.chat.completions.list(**query)] == wanted
    with pytest.raises(openai.BadRequestError, match="colour"):
        await client.chat.completions.list(extra_query={"colour": "x"})


async def test_update(client):
    made = await create(client, metadata={"a": "b"})
    assert (await client.chat.completions.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
    assert (await client.chat.completions.retrieve(made.id)).metadata == {"c": "d"}
    with pytest.raises(openai.BadRequestError, match="metadata"):
        await client.chat.completions.update(made.id, metadata={"c": 5})


async def test_delete(client):
    made = await create(client)
    assert (await client.chat.completions.delete(made.id)).deleted
    for call in (client.chat.completions.retrieve, client.chat.completions.delete):
        with pytest.raises(openai.NotFoundError, match="chat completion"):
            await call(made.id)


async def test_kept_only_where_asked_for_and_whole(api, client):
    made = await create(client, store=None)
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.retrieve(made.id)
    api.script("a", finish_reason="error")
    with pytest.raises(openai.APIError):
        await create(client)
    assert [one async for one in client.chat.completions.list()] == []


async def test_refused(api):
    assert refused(await api.chat(store=True, metadata={"a": 1}))["param"] == "metadata"
    assert refused(await api.chat(store="yes"))["param"] == "store"
    assert refused(await api.complete(store=True))["param"] == "store"
    batch = {"messages": [SAY], "store": True}
    assert refused(await api.post("/v1/chat/completions/batch", **batch))["param"] == "store"
