"""`/v1/responses`, with OpenAI's own client."""

import asyncio
import json

import httpx2
import openai
import pytest
from openai.types.responses import Response

from rayllm.api.fake import Script
from rayllm.api.responses_request import ResponsesRequest, messages_of
from rayllm.api.responses_store import Kept, ResponseNotFound, ResponseStore
from rayllm.api.responses_writer import ResponseWriter
from rayllm.errors import Overloaded

from . import conftest
from .chunks import begun, chunks
from .conftest import MODEL, Harness, ok, strict_json

ECHOED = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def client_of(api: Harness):
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(api.app), base_url="http://test")
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture
async def client(api):
    async with client_of(api) as client:
        yield client


async def create(client, **more):
    return await client.responses.create(**{"model": MODEL, "input": "hi", **more})


async def refused(client, **more):
    with pytest.raises(openai.BadRequestError) as error:
        await create(client, extra_body=more)
    return error.value


def prompt_of(api: Harness) -> str:
    return api.tokenizer.decode(api.service.adds[-1].prompt_token_ids, False)


async def finished(client, id_: str) -> Response:
    async with asyncio.timeout(5):
        while (response := await client.responses.retrieve(id_)).status == "in_progress":
            await asyncio.sleep(0.01)
    return response


class TestWhole:
    async def test_plain(self, api, client):
        api.scripts(Script([api.ids("Hello"), api.ids(", world")], "stop"))
        response = await create(client, instructions="Be kind", max_output_tokens=20, metadata={"a": "b"})
        assert response.id.startswith("resp_")
        assert (response.status, response.model, response.output_text) == ("completed", MODEL, "Hello, world")
        assert (response.output[0].type, response.output[0].status) == ("message", "completed")
        assert (response.instructions, response.max_output_tokens, response.metadata) == ("Be kind", 20, {"a": "b"})
        assert prompt_of(api) == "<|system|>Be kind<|end|><|user|>hi<|end|><|assistant|>"
        assert api.service.adds[0].sampling.max_tokens == 20
        assert response.usage.input_tokens == len(api.service.adds[0].prompt_token_ids)
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens

    async def test_cut(self, client):
        response = await create(client, max_output_tokens=2)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[0].status == "incomplete"

    async def test_parameters(self, api, client):
        more = {"seed": 5, "top_k": 3, "cache_salt": "s", "stop": ["x"]}
        response = await create(client, temperature=0.5, top_p=0.25, extra_body=more)
        add = api.service.adds[0]
        assert (add.sampling.temperature, add.sampling.top_p, add.sampling.seed, add.sampling.top_k) == (
            0.5,
            0.25,
            5,
            3,
        )
        assert (add.cache_salt, add.sampling.stop) == ("s", ("x",))
        assert (response.temperature, response.top_p) == (0.5, 0.25)

    async def test_logprobs(self, api, client):
        response = await create(client, include=["message.output_text.logprobs"], top_logprobs=2)
        logprobs = response.output[0].content[0].logprobs
        assert len(logprobs) == response.usage.output_tokens
        assert len(logprobs[0].top_logprobs) == 2

    def test_all_kinds_of_items(self):
        request = ResponsesRequest(include=["reasoning.encrypted_content"])
        body = ResponseWriter(begun("resp_1"), request, ECHOED, lambda response: None).whole([])
        Response.model_validate(body)
        assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
        assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
        assert (body["output"][2]["call_id"], body["output"][2]["arguments"]) == ("c0", '{"a": 1}')
        assert len({item["id"] for item in body["output"]}) == 4
        back = messages_of(None, body["output"])
        assert [message["role"] for message in back] == ["assistant"]
        assert (back[0]["reasoning_content"], len(back[0]["tool_calls"])) == ("Let me see.", 2)
        sealed = {**body["output"][0], "content": []}
        assert messages_of(None, [sealed])[0]["reasoning_content"] == "Let me see."


class TestStreamed:
    async def test_equals_whole(self, api, client):
        api.scripts(Script([api.ids(text) for text in ("Hel", "lo", " 龜🫠")], "stop"))
        stream = await create(client, stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.delta", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        final = events[-1].response
        assert final.output_text == "".join(e.delta for e in events if e.type.endswith("output_text.delta"))
        whole = await create(client)
        assert (whole.output_text, whole.usage) == (final.output_text, final.usage)

    async def test_the_client_s_own_helper(self, api, client):
        api.scripts(Script([[70], [71]], "stop"))
        async with client.responses.stream(model=MODEL, input="hi") as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert final.output_text == api.tokenizer.decode([70, 71])

    async def test_error(self, api, client):
        api.script("a", finish_reason="error")
        events = [event async for event in await create(client, stream=True)]
        assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
        assert "script" in events[-1].response.error.message
        assert (await client.responses.retrieve(events[-1].response.id)).status == "failed"

    def test_all_kinds_of_items(self):
        ended = []
        writer = ResponseWriter(begun("resp_1"), ResponsesRequest(), ECHOED, ended.append)
        data = writer.opening() + b"".join(writer.event(None, chunk) for chunk in chunks()) + writer.closing()
        events = [strict_json(block.split("data: ")[1]) for block in data.decode().strip().split("\n\n")]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == ended[0]["output"] == events[-1]["response"]["output"]
        for i, kind in ((0, "reasoning_text"), (1, "output_text"), (2, "function_call_arguments")):
            own = [event for event in events if event.get("output_index") == i]
            text = "".join(event["delta"] for event in own if event["type"] == f"response.{kind}.delta")
            last = next(event for event in own if event["type"] == f"response.{kind}.done")
            assert text == last["arguments" if i == 2 else "text"]


class TestInput:
    async def test_items(self, api, client):
        items = [
            {"role": "developer", "content": "d"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"role": "user", "content": "c"},
        ]
        await create(client, input=items)
        expected = "<|system|>d<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"
        assert prompt_of(api) == expected

    def test_calls_and_their_outputs(self):
        call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
        items = [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": "I add"},
            call,
            {**call, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ]
        first, second = messages_of(None, items)
        assert (first["reasoning_content"], first["content"]) == ("hm", "I add")
        assert [one["id"] for one in first["tool_calls"]] == ["c1", "c2"]
        assert second == {"role": "tool", "tool_call_id": "c1", "content": "3"}

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("input", ""),
            ("input", []),
            ("input", [1]),
            ("input", [{"role": "user"}]),
            ("input", [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]),
            ("input", [{"type": "item_reference", "id": "x"}]),
            ("input", [{"type": "function_call", "call_id": "c"}]),
            ("input", [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA*"}]),
            ("max_output_tokens", 0),
            ("temperature", 9),
            ("tools", [{"type": "web_search"}]),
            ("tools", [{"type": "function"}]),
            ("tool_choice", {"type": "file_search"}),
            ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}),
            ("reasoning", {"effort": "low"}),
            ("reasoning", {"summary": "detailed"}),
            ("text", {"format": {"type": "grammar"}}),
            ("text", {"verbosity": "low"}),
            ("truncation", "middle"),
            ("include", ["file_search_call.results"]),
            ("conversation", "c"),
            ("background", "yes"),
            ("service_tier", "flex"),
            ("messages", []),
            ("n", 2),
        ],
    )
    async def test_refused(self, client, field, value):
        error = await refused(client, **{field: value})
        assert field in error.message
        assert error.param.partition("[")[0].partition(".")[0] == field

    async def test_what_asks_for_nothing(self, client):
        await create(
            client, background=False, truncation="disabled", text={"format": {"type": "text"}, "verbosity": "medium"},
            reasoning={"summary": "auto"}, tools=[], tool_choice="auto", parallel_tool_calls=True, user="u",
            service_tier="auto", prompt_cache_key="k", safety_identifier="s", max_tool_calls=3,
            include=["reasoning.encrypted_content"], stream_options={"include_obfuscation": False}, stream=False,
        )  # fmt: skip

    async def test_calls_need_a_parser(self, client):
        assert (await refused(client, tools=[ADD])).param == "tool_choice"

    async def test_count(self, api, client):
        count = await client.responses.input_tokens.count(model=MODEL, input="hi", instructions="Be kind")
        response = await create(client, instructions="Be kind")
        assert count.input_tokens == response.usage.input_tokens


class TestParsers:
    """With the parsers of a server, thoughts and calls are items."""

    async def test_calls_and_the_turn_after(self, make_api):
        api = make_api(max_model_len=4096, tool_parser="hermes", auto_tools=True)
        call = '<tool_call>{"name": "add", "arguments": {"a": [1, "ü"]}}</tool_call>'
        api.scripts(Script([[i] for i in api.ids(call)], "stop"))
        async with client_of(api) as client:
            whole = await create(client, tools=[ADD])
            events = [event async for event in await create(client, tools=[ADD], stream=True)]
            for response in (whole, events[-1].response):
                [item] = response.output
                assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "add", {"a": [1, "ü"]})
            output = {"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "3"}
            await create(client, input=[output], previous_response_id=whole.id, tools=[ADD])
        assert "<|tool|>3" in prompt_of(api)

    async def test_thoughts(self, make_api):
        api = make_api(max_model_len=4096, reasoning_parser="deepseek_r1")
        api.scripts(Script([[i] for i in api.ids("<think>hm, well</think>Yes")], "stop"))
        async with client_of(api) as client:
            whole = await create(client)
            events = [event async for event in await create(client, stream=True)]
        for response in (whole, events[-1].response):
            assert [item.type for item in response.output] == ["reasoning", "message"]
            assert (response.output[0].content[0].text, response.output_text) == ("hm, well", "Yes")
            assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


class TestStored:
    async def test_retrieve(self, client):
        response = await create(client)
        assert await client.responses.retrieve(response.id) == response

    async def test_turns(self, api, client):
        api.scripts(Script([api.ids("yes")], "stop"))
        first = await create(client, instructions="only now")
        second = await create(client, input="more", previous_response_id=first.id)
        assert prompt_of(api) == "<|user|>hi<|end|><|assistant|>yes<|end|><|user|>more<|end|><|assistant|>"
        assert second.previous_response_id == first.id
        items = [item async for item in client.responses.input_items.list(second.id, limit=2, order="asc")]
        assert [item.role for item in items] == ["user", "assistant", "user"]
        assert [item async for item in client.responses.input_items.list(second.id)] == items[::-1]

    async def test_turns_that_do_not_fit_are_left_out(self, api, client):
        api.scripts(Script([api.ids("yes")], "stop"))
        first = await create(client, input=[{"role": "developer", "content": "D"}, {"role": "user", "content": "a"}])
        for name in "bcdef":
            more = {"truncation": "auto", "max_output_tokens": 6, "previous_response_id": first.id}
            first = await create(client, input=name * 4, **more)
        assert first.truncation == "auto"
        assert len(api.service.adds[-1].prompt_token_ids) <= 58
        assert prompt_of(api).startswith("<|system|>D<|end|><|user|>")
        assert "<|user|>a" not in prompt_of(api)
        assert prompt_of(api).endswith("<|user|>ffff<|end|><|assistant|>")
        count = await client.responses.input_tokens.count(
            input="more", previous_response_id=first.id, truncation="auto", model=MODEL
        )
        assert count.input_tokens < 64
        with pytest.raises(openai.BadRequestError, match="context"):
            await create(client, input="more", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="context"):
            await create(client, input="m" * 99, previous_response_id=first.id, truncation="auto")

    async def test_not_stored(self, client):
        response = await create(client, store=False)
        with pytest.raises(openai.NotFoundError, match="never stored"):
            await client.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError, match="API server"):
            await create(client, previous_response_id=response.id)

    async def test_deleted(self, client):
        response = await create(client)
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)

    async def test_only_background_ones_can_be_cancelled(self, client):
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel((await create(client)).id)

    async def test_a_client_that_leaves_leaves_nothing(self, api, client):
        api.scripts(Script([[70]], hang=True))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await create(client)
        assert api.service.streams[0].aborted


class TestBackground:
    async def test_retrieved_when_done(self, api, client):
        api.scripts(Script([[70], [71]], "stop", delay=0.02))
        response = await create(client, background=True)
        assert (response.status, response.background, response.output) == ("in_progress", True, [])
        with pytest.raises(openai.BadRequestError, match="not finished"):
            await create(client, previous_response_id=response.id)
        done = await finished(client, response.id)
        assert (done.status, done.output_text) == ("completed", api.tokenizer.decode([70, 71]))
        await create(client, previous_response_id=response.id)

    async def test_cancelled(self, api, client):
        api.scripts(Script([[70]], hang=True))
        response = await create(client, background=True)
        await asyncio.sleep(0.02)
        for _ in range(2):
            assert (await client.responses.cancel(response.id)).status == "cancelled"
        assert api.service.streams[0].aborted
        assert (await client.responses.retrieve(response.id)).status == "cancelled"

    async def test_deleted(self, api, client):
        api.scripts(Script([[70]], hang=True))
        response = await create(client, background=True)
        await client.responses.delete(response.id)
        await asyncio.sleep(0.02)
        assert api.service.streams[0].aborted
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)

    async def test_streamed_again(self, api, client):
        api.scripts(Script([[70], [71]], "stop"))
        events = [event async for event in await create(client, background=True, stream=True)]
        assert events[-1].type == "response.completed"
        again = await client.responses.retrieve(events[0].response.id, stream=True, starting_after=3)
        assert [event async for event in again] == events[4:]
        plain = await create(client, background=True)
        with pytest.raises(openai.BadRequestError, match="stream"):
            await client.responses.retrieve(plain.id, stream=True)

    async def test_failed(self, api, client):
        api.script("a", finish_reason="error")
        response = await create(client, background=True)
        assert (await finished(client, response.id)).error.message

    async def test_refused_at_once(self, client):
        assert (await refused(client, background=True, temperature=9)).param == "temperature"
        assert (await refused(client, background=True, store=False)).param == "background"


class TestStore:
    def keep(self, store, name, size=100, **more):
        kept = Kept({"id": name, "output": ["x" * size]}, [], **more)
        store.keep(kept)
        return kept

    def test_bounded(self):
        store = ResponseStore(most_bytes=1000)
        for i in range(50):
            self.keep(store, str(i))
            assert store.bytes <= 1000
        store.get("49")
        with pytest.raises(ResponseNotFound):
            store.get("0")
        assert 5 < len(store) < 10

    def test_the_last_used_stay(self):
        store = ResponseStore(most_bytes=500)
        self.keep(store, "a")
        for i in range(10):
            store.get("a")
            self.keep(store, str(i))
        store.get("a")

    async def test_those_that_run_stay(self):
        store = ResponseStore(most_bytes=500, most_running=1)
        store.check_room()
        task = asyncio.ensure_future(asyncio.sleep(10))
        self.keep(store, "a", task=task)
        for i in range(10):
            self.keep(store, str(i))
        assert store.get("a").running
        with pytest.raises(Overloaded):
            store.check_room()
        task.cancel()


@pytest.mark.parametrize("query", ["stream=yes", "stream=true&starting_after=-2", "starting_after="])
async def test_a_stored_response_is_asked_for_by_true_parameters(api, query):
    stored = ok(await api.post("/v1/responses", input="hi", background=True))
    conftest.refused(await api.request("GET", f"/v1/responses/{stored['id']}?{query}"))


async def test_a_page_of_items_has_a_limit(api):
    stored = ok(await api.post("/v1/responses", input="hi"))
    conftest.refused(await api.request("GET", f"/v1/responses/{stored['id']}/input_items?limit=0000000011111"))
