"""`/v1/messages` and `/v1/messages/count_tokens`, with Anthropic's own client."""

import anthropic
import httpx2
import pytest

from rayllm.api.anthropic import MessagesWriter
from rayllm.api.fake import Script

from ..render.samples import byte_level
from .chunks import begun, chunks
from .conftest import MODEL, Harness, strict_json

SAY = [{"role": "user", "content": "hi"}]
CALL = 'I add <tool_call>{"name": "add", "arguments": {"a": [1, "ü"]}}</tool_call>'
TOOLS = [{"name": "add", "description": "Adds", "input_schema": {"type": "object"}}]
THINKER = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}{{ enable_thinking }}"
TELLS_ALL = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['reasoning_content'] }}{{ m['content'] }}"
    "{{ m['tool_calls'] }}{% endfor %}"
)


def client_of(api: Harness, **more):
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(api.app), base_url="http://test")
    given = {"api_key": "none", **more}
    return anthropic.AsyncAnthropic(base_url="http://test", http_client=http, max_retries=0, **given)


@pytest.fixture
async def client(api):
    async with client_of(api) as client:
        yield client


async def create(client, **more):
    return await client.messages.create(**{"model": MODEL, "max_tokens": 30, "messages": SAY, **more})


async def refused(client, **more):
    with pytest.raises(anthropic.BadRequestError) as error:
        await create(client, **more)
    assert error.value.body["error"]["type"] == "invalid_request_error"
    return error.value.body["error"]["message"]


def prompt_of(api: Harness) -> str:
    return api.tokenizer.decode(api.service.adds[-1].prompt_token_ids, False)


class TestWhole:
    async def test_plain(self, api, client):
        api.scripts(Script([api.ids("Hello"), api.ids(", world")], "stop"))
        message = await create(client, system="Be kind")
        assert message.id.startswith("msg_")
        assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
        assert [block.model_dump(exclude_none=True) for block in message.content] == [
            {"type": "text", "text": "Hello, world"}
        ]
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert prompt_of(api) == "<|system|>Be kind<|end|><|user|>hi<|end|><|assistant|>"
        assert message.usage.input_tokens == len(api.service.adds[0].prompt_token_ids)
        assert message.usage.output_tokens == len(api.ids("Hello")) + len(api.ids(", world"))

    async def test_length(self, api, client):
        api.scripts(Script([[65]] * 9))
        message = await create(client, max_tokens=3)
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)

    async def test_stop_sequences(self, api, client):
        api.script("one ", "STOP two")
        message = await create(client, stop_sequences=["STOP", "x"])
        assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
            "one ",
            "stop_sequence",
            "STOP",
        )

    async def test_cached_tokens_count_apart(self, make_api):
        async with client_of(make_api(prompt_tokens_details=True)) as client:
            assert (await create(client)).usage.cache_read_input_tokens == 0

    async def test_parameters(self, api, client):
        shape = {"temperature": 0.3, "top_k": 4, "top_p": 0.5}
        await create(client, metadata={"user_id": "u"}, service_tier="auto", extra_body=shape)
        sampling = api.service.adds[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.3, 4, 0.5, 30)

    def test_all_kinds_of_blocks(self):
        body = MessagesWriter(begun()).whole([])
        assert body["content"] == [
            {"type": "thinking", "thinking": "Let me see.", "signature": ""},
            {"type": "text", "text": "I look it up."},
            {"type": "tool_use", "id": "c0", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "c1", "name": "now", "input": {}},
        ]
        assert body["stop_reason"] == "tool_use"
        anthropic.types.Message.model_validate(body)


class TestStreamed:
    async def test_equals_whole(self, api, client):
        steps = [api.ids(text) for text in ("Hel", "lo", " 龜🫠")]
        api.scripts(Script(steps, "stop"))
        kinds = []
        async with client.messages.stream(model=MODEL, max_tokens=30, messages=SAY) as stream:
            async for event in stream:
                kinds.append(event.type)
            final = await stream.get_final_message()
        assert final.content[0].text == "Hello 龜🫠"
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", sum(map(len, steps)))
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        whole = await create(client)
        assert (whole.content[0].text, whole.usage) == (final.content[0].text, final.usage)

    async def test_raw(self, api):
        body = {"model": MODEL, "max_tokens": 3, "messages": SAY, "stream": True}
        reply = await api.request("POST", "/v1/messages", json=body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        for block in reply.text.strip().split("\n\n"):
            name, data = block.split("\n")
            assert name == "event: " + strict_json(data.removeprefix("data: "))["type"]

    async def test_error(self, api, client):
        api.script("a", finish_reason="error")
        with pytest.raises(anthropic.APIStatusError, match="script"):
            async with client.messages.stream(model=MODEL, max_tokens=30, messages=SAY) as stream:
                await stream.get_final_message()

    def test_all_kinds_of_blocks(self):
        writer = MessagesWriter(begun())
        text = (writer.opening() + b"".join(writer.event(None, data) for data in chunks()) + writer.closing()).decode()
        events = [strict_json(block.split("data: ")[1]) for block in text.strip().split("\n\n")]
        starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert starts == [
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "text", "text": ""},
            {"type": "tool_use", "id": "c0", "name": "add", "input": {}},
            {"type": "tool_use", "id": "c1", "name": "now", "input": {}},
        ]
        deltas = [
            (event["index"], event["delta"]["type"]) for event in events if event["type"] == "content_block_delta"
        ]
        assert deltas == [(0, "thinking_delta")] * 2 + [(1, "text_delta")] * 2 + [(2, "input_json_delta")] * 2 + [
            (3, "input_json_delta")
        ]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"


class TestInput:
    async def test_blocks(self, api, client):
        document = {"type": "text", "media_type": "text/plain", "data": "the fox"}
        content = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                   {"type": "document", "source": document, "title": "T"}]  # fmt: skip
        await create(client, messages=[{"role": "user", "content": content}], system=[{"type": "text", "text": "s"}])
        assert prompt_of(api) == "<|system|>s<|end|><|user|>a\nT\nthe fox<|end|><|assistant|>"

    async def test_turns_of_one_role_are_one(self, api, client):
        await create(client, messages=[*SAY, {"role": "user", "content": "you"}])
        assert prompt_of(api) == "<|user|>hi\nyou<|end|><|assistant|>"

    async def test_the_assistant_s_last_message_goes_on(self, api, client):
        api.script("!")
        message = await create(client, messages=[*SAY, {"role": "assistant", "content": "Sure"}])
        assert prompt_of(api) == "<|user|>hi<|end|><|assistant|>Sure"
        assert message.content[0].text == "!"

    async def test_tools_and_thoughts_of_earlier_turns(self, make_api):
        api = make_api(tokenizer=byte_level(TELLS_ALL), max_model_len=1000)
        use = [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "I add"},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
        ]
        result = [
            {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True},
            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "yes"}]},
            {"type": "text", "text": "go on"},
        ]
        turns = [{"role": "assistant", "content": use}, {"role": "user", "content": result}]
        async with client_of(api) as client:
            await create(client, messages=[*SAY, *turns], tools=TOOLS, tool_choice={"type": "none"})
        assert "<|assistant|>hmI add[{" in prompt_of(api)
        assert "'name': 'add', 'arguments': {'a': 1}" in prompt_of(api)
        assert "<|tool|>Error: no<|tool|>yes<|user|>go on" in prompt_of(api)

    async def test_thinking(self, make_api):
        api = make_api(tokenizer=byte_level(THINKER))
        async with client_of(api) as client:
            for thinking, shown in (({"type": "disabled"}, "False"), ({"type": "adaptive"}, "True")):
                await create(client, thinking=thinking)
                assert prompt_of(api).endswith(shown)
            message = await refused(client, thinking={"type": "enabled", "budget_tokens": 1024})
            assert message.startswith("thinking: ")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("messages", []),
            ("messages", [{"role": "tool", "content": "x"}]),
            ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
            ("messages", [{"role": "user", "content": [1]}]),
            ("messages", [{"role": "user", "content": 1}]),
            ("messages", [{"role": "user", "content": []}]),
            ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
            ("messages", [*SAY, {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]),
            ("messages", [*SAY, {"role": "assistant", "content": ""}]),
            ("max_tokens", 0),
            ("temperature", 9),
            ("stop_sequences", [""]),
            ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
            ("tools", [{"name": "f"}]),
            ("tool_choice", {"type": "many"}),
            ("thinking", {"type": "loud"}),
            ("output_config", {"effort": "low"}),
            ("output_config", {"format": {"type": "xml"}}),
            ("service_tier", "priority"),
            ("container", "c"),
            ("top_k", -5),
        ],
    )
    async def test_refused(self, client, field, value):
        assert field in await refused(client, extra_body={field: value})

    async def test_calls_need_a_parser(self, client):
        assert "tool_choice" in await refused(client, tools=TOOLS)


class TestParsers:
    """With the parsers of a server, thoughts and calls are blocks."""

    async def test_calls(self, make_api):
        api = make_api(max_model_len=4096, tool_parser="hermes", auto_tools=True)
        api.scripts(Script([[i] for i in api.ids(CALL)], "stop"))
        ask = {"model": MODEL, "max_tokens": 500, "messages": SAY, "tools": TOOLS}
        async with client_of(api) as client:
            message = await client.messages.create(**ask)
            async with client.messages.stream(**ask) as stream:
                streamed = await stream.get_final_message()
        for one in (message, streamed):
            assert [block.type for block in one.content] == ["text", "tool_use"]
            assert (one.content[1].name, one.content[1].input) == ("add", {"a": [1, "ü"]})
            assert one.content[1].id
            assert one.stop_reason == "tool_use"
        assert message.content[0].text == streamed.content[0].text

    async def test_a_named_call(self, make_api):
        api = make_api(max_model_len=4096)
        api.scripts(Script([[i] for i in api.ids('{"a": [1]}')], "stop"))
        ask = {"model": MODEL, "max_tokens": 500, "messages": SAY, "tools": TOOLS}
        async with client_of(api) as client:
            message = await client.messages.create(**ask, tool_choice={"type": "tool", "name": "add"})
        assert (message.content[0].input, message.stop_reason) == ({"a": [1]}, "tool_use")

    async def test_thoughts(self, make_api):
        api = make_api(max_model_len=4096, reasoning_parser="deepseek_r1")
        api.scripts(Script([[i] for i in api.ids("<think>hm, well</think>Yes")], "stop"))
        ask = {"model": MODEL, "max_tokens": 500, "messages": SAY}
        async with client_of(api) as client:
            message = await client.messages.create(**ask)
            async with client.messages.stream(**ask) as stream:
                streamed = await stream.get_final_message()
            hidden = await client.messages.create(**ask, thinking={"type": "adaptive", "display": "omitted"})
        for one in (message, streamed):
            assert [block.type for block in one.content] == ["thinking", "text"]
            assert (one.content[0].thinking, one.content[1].text) == ("hm, well", "Yes")
        assert [block.type for block in hidden.content] == ["text"]


class TestErrors:
    async def test_unknown_model(self, client):
        with pytest.raises(anthropic.NotFoundError, match="nope"):
            await create(client, model="nope")

    async def test_keys(self, make_api):
        api = make_api(api_keys=("k",))
        async with client_of(api) as client:
            with pytest.raises(anthropic.AuthenticationError, match="key"):
                await create(client)
        for more in ({"api_key": "k"}, {"api_key": None, "auth_token": "k"}):
            async with client_of(api, **more) as client:
                await create(client)

    async def test_overload(self, api, client):
        from rayllm.errors import Overloaded

        api.service.refusal = Overloaded("full")
        with pytest.raises(anthropic.APIStatusError) as error:
            await create(client)
        assert error.value.body["error"]["type"] == "overloaded_error"
        assert error.value.response.headers["retry-after"] == "1"


async def test_count_tokens(api, client):
    count = await client.messages.count_tokens(model=MODEL, messages=SAY, system="Be kind")
    message = await create(client, system="Be kind")
    assert count.input_tokens == message.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        await client.messages.count_tokens(model=MODEL, messages=[])
