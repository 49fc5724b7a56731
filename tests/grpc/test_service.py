"""RPCs of `rayllm.v1.LLM`: what clients send and get, and the codes of errors."""

import asyncio
import json

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from grpc import StatusCode

from rayllm.api.fake import Script
from rayllm.errors import Overloaded, ReplicaLost
from rayllm.grpc import rayllm_pb2 as pb
from rayllm.grpc.rayllm_pb2_grpc import LLMStub

from ..api.conftest import MODEL
from ..api.test_disconnects import EndlessStream
from .conftest import chat_request, completion_request, until

pytestmark = pytest.mark.option("grpc")


async def refused(call, code=StatusCode.INVALID_ARGUMENT):
    """The error of an RPC."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == code, caught.value
    return caught.value


def text_of(answers, index=0):
    return "".join(choice.text for answer in answers for choice in answer.choices if choice.index == index)


class TestAnswers:
    async def test_chat(self, served):
        served.script("Hello", ", ", "world", finish_reason="stop")
        answer = await served.chat()
        (choice,) = answer.choices
        assert (choice.role, choice.text, choice.finish_reason) == ("assistant", "Hello, world", "stop")
        assert answer.model == MODEL
        assert answer.id.startswith("chatcmpl-")
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert not answer.usage.HasField("cached_tokens")

    async def test_streamed_chat(self, served):
        served.script("Hello", ", ", "world", finish_reason="stop")
        whole = await served.chat(n=2, seed=1)
        first, *middle, last = [answer async for answer in served.stream_chat(n=2, seed=1)]
        assert [text_of(middle, i) for i in range(2)] == [choice.text for choice in whole.choices]
        assert [choice.role for choice in first.choices] == ["assistant"]
        assert [c.finish_reason for a in middle for c in a.choices if c.finish_reason] == ["stop", "stop"]
        assert (len(last.choices), last.usage) == (0, whole.usage)

    async def test_completions(self, served):
        served.script("Hello", ", ", "world")
        assert text_of([await served.complete(echo=True)]) == "hiHello, world"
        assert text_of([answer async for answer in served.stream_complete()]) == "Hello, world"
        ids = served.ids("hi")
        by_ids = pb.CompletionRequest(token_ids=pb.TokenIds(ids=ids), parameters=pb.Parameters(return_token_ids=True))
        answer = await served.stub.Complete(by_ids)
        assert list(answer.prompt_token_ids) == ids
        assert served.tokenizer.decode(list(answer.choices[0].token_ids), True) == "Hello, world"
        assert served.service.adds[-1].prompt_token_ids == ids

    async def test_logprobs_are_the_same_for_both(self, served):
        served.script("ab")
        chat = await served.chat(logprobs=2)
        text = await served.complete(logprobs=2)
        streamed = [answer async for answer in served.stream_chat(logprobs=2)]
        tokens = chat.choices[0].logprobs
        assert [token.token for token in tokens] == ["a", "b"]
        assert [token.logprob for token in tokens] == [-0.5, -0.5]
        assert [len(token.top_logprobs) for token in tokens] == [2, 2]
        assert list(text.choices[0].logprobs) == list(tokens)
        assert [token for answer in streamed for c in answer.choices for token in c.logprobs] == list(tokens)
        echoed = await served.complete(echo=True, logprobs=0)
        assert not echoed.choices[0].logprobs[0].HasField("logprob")

    async def test_stop_reasons(self, served):
        served.script("Hello", ". And", finish_reason="stop")
        answer = await served.chat(stop=["."])
        assert (text_of([answer]), answer.choices[0].stop) == ("Hello", ".")
        end = served.ids("x")[0]
        served.scripts(Script([served.ids("ax")], "stop", stop_token_id=end))
        answer = await served.chat(stop_token_ids=[end])
        assert (text_of([answer]), answer.choices[0].stop_token_id) == ("a", end)

    async def test_tokens_and_models(self, served):
        ids = served.ids("hi there")
        tokenized = await served.stub.Tokenize(pb.TokenizeRequest(prompt="hi there", return_token_strs=True))
        assert list(tokenized.tokens) == ids
        assert len(tokenized.token_strs) == len(ids)
        chat = await served.stub.Tokenize(pb.TokenizeRequest(messages=[pb.Message(role="user", content="hi")]))
        assert set(served.ids("hi")) <= set(chat.tokens)
        assert (await served.stub.Detokenize(pb.DetokenizeRequest(tokens=ids))).prompt == "hi there"
        models = (await served.stub.ListModels(pb.ListModelsRequest())).models
        assert [model.id for model in models] == [MODEL, "alias"]
        assert models[0].max_model_len == tokenized.max_model_len

    async def test_metrics_and_profiles(self, served, make_served):
        await served.complete()
        assert (await served.stub.GetMetrics(pb.GetMetricsRequest())).text == "fake_requests_total 1\n"
        await refused(served.stub.StartProfile(pb.ProfileRequest()), StatusCode.NOT_FOUND)
        profiled = await make_served(profiling=True)
        await profiled.stub.StartProfile(pb.ProfileRequest())
        await profiled.stub.StopProfile(pb.ProfileRequest())
        assert [command.begin for command in profiled.service.commands] == [True, False]


async def test_every_parameter_arrives_as_over_http(make_served):
    """Each value reaches the engine, and as the same field of an HTTP request does."""
    served = await make_served(priority_scheduling=True, max_model_len=64)
    parameters = {
        "max_tokens": 5, "min_tokens": 2, "n": 2, "temperature": 0.0, "top_p": 0.5, "top_k": 7, "min_p": 0.25,
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5, "seed": -(2**62),
        "logit_bias": {5: 1.5}, "allowed_token_ids": [5, 6], "bad_words": ["no"], "stop": ["x", "y"],
        "stop_token_ids": [9], "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
        "add_special_tokens": True, "truncate_prompt_tokens": 1, "echo": False, "logprobs": 3,
        "return_tokens_as_token_ids": True, "return_token_ids": True, "priority": -3, "cache_salt": "s",
        "request_id": "mine",
    }  # fmt: skip
    xargs = Struct()
    xargs.update({"whole": 3, "part": 0.5, "list": [1, "a"]})
    assert {*parameters, "vllm_xargs", "structured_outputs"} == set(pb.Parameters.DESCRIPTOR.fields_by_name)
    answer = await served.complete(**parameters, vllm_xargs=xargs)
    assert answer.id.startswith("cmpl-mine-")
    body = parameters | {"logit_bias": {"5": 1.5}, "vllm_xargs": {"whole": 3, "part": 0.5, "list": [1, "a"]}}
    assert (await served.post("/v1/completions", prompt="hi", **body)).status_code == 200
    ours, theirs = served.service.adds[:2], served.service.adds[2:]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.sampling == other.sampling
        assert (mine.priority, mine.cache_salt, mine.prompt_token_ids) == (-3, "s", other.prompt_token_ids)


async def test_templates_get_whole_numbers(make_served):
    served = await make_served(trust_request_chat_template=True)
    kwargs = Struct()
    kwargs.update({"n": 3, "deep": {"x": [1.5, 2]}})
    messages = [pb.Message(role="user", content="")]
    template = "{{ n }} {{ deep.x }} {{ messages[0].content == '' }}"
    request = pb.ChatRequest(messages=messages, chat_template=template, chat_template_kwargs=kwargs)
    await served.stub.Chat(request)
    assert served.tokenizer.decode(served.service.adds[0].prompt_token_ids, True) == "3 [1.5, 2] True"


class TestForms:
    @pytest.mark.parametrize(
        "form",
        [
            {"json": '{"type": "object"}', "disable_any_whitespace": True, "backend": "guidance"},
            {"json": "{}", "whitespace_pattern": " *", "disable_additional_properties": False},
            {"json_object": True}, {"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": 'start: "a"'},
            {"structural_tag": '{"structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]}'},
        ],
    )  # fmt: skip
    async def test_each_arrives_as_over_http(self, served, form):
        await served.chat(structured_outputs=pb.StructuredOutputs(**form))
        await served.complete(structured_outputs=pb.StructuredOutputs(**form))
        assert (await served.post("/v1/completions", prompt="hi", structured_outputs=form)).status_code == 200
        ours, text, theirs = [add.sampling.structured_outputs for add in served.service.adds]
        assert ours == text == theirs

    @pytest.mark.parametrize(
        ("form", "reason"),
        [
            ({}, "give one of"),
            ({"regex": "a", "choice": ["a"]}, "regex and choice"),
            ({"json": "{"}, "not JSON"),
            ({"regex": ""}, "must not be empty"),
            ({"regex": "a", "whitespace_pattern": " "}, "is for JSON"),
            ({"regex": "a", "backend": "best"}, "backend"),
        ],
    )
    async def test_wrong_ones_are_refused(self, served, form, reason):
        for call in (served.chat, served.complete):
            error = await refused(call(structured_outputs=pb.StructuredOutputs(**form)))
            assert reason in error.details()
            assert error.trailing_metadata()["param"] == "structured_outputs"
        assert served.service.adds == []


SCHEMA = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}'


def tools_request(content="hi", **fields):
    tools = [
        pb.Tool(function=pb.Function(name=name, description="d", parameters=SCHEMA, strict=True))
        for name in ("add", "mul")
    ]
    return pb.ChatRequest(messages=[pb.Message(role="user", content=content)], tools=tools, **fields)


class TestTools:
    @pytest.fixture
    async def served(self, make_served):
        return await make_served(max_model_len=4096)

    async def test_a_call_that_is_asked_for(self, served):
        served.script('{"b": ', "1}", finish_reason="stop")
        request = tools_request(tool_choice=pb.ToolChoice(function="mul"))
        (choice,) = (await served.stub.Chat(request)).choices
        (call,) = choice.tool_calls
        assert (call.index, call.function.name, call.function.arguments) == (0, "mul", '{"b": 1}')
        assert call.id
        assert (choice.text, choice.finish_reason) == ("", "stop")
        pieces = [c for answer in [a async for a in served.stub.StreamChat(request)] for c in answer.choices]
        calls = [call for piece in pieces for call in piece.tool_calls]
        assert "".join(call.function.name for call in calls) == "mul"
        assert "".join(call.function.arguments for call in calls) == '{"b": 1}'
        ours = served.service.adds[0]
        function = {"description": "d", "parameters": json.loads(SCHEMA), "strict": True}
        tools = [{"type": "function", "function": {"name": name, **function}} for name in ("add", "mul")]
        reply = await served.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], tools=tools,
            tool_choice={"type": "function", "function": {"name": "mul"}},
        )  # fmt: skip
        assert reply.status_code == 200
        theirs = served.service.adds[-1]
        assert (ours.prompt_token_ids, ours.sampling.structured_outputs) == (
            theirs.prompt_token_ids, theirs.sampling.structured_outputs,
        )  # fmt: skip

    async def test_several_calls(self, served):
        calls = '[{"name": "add", "parameters": {}}, {"name": "mul", "parameters": {"b": 2}}]'
        served.script(calls, finish_reason="stop")
        required = pb.ToolChoice(mode="required")
        (choice,) = (await served.stub.Chat(tools_request(tool_choice=required))).choices
        assert [(c.index, c.function.name) for c in choice.tool_calls] == [(0, "add"), (1, "mul")]
        assert choice.finish_reason == "tool_calls"
        request = tools_request(tool_choice=required, parallel_tool_calls=False)
        (choice,) = (await served.stub.Chat(request)).choices
        assert [c.function.name for c in choice.tool_calls] == ["add"]

    async def test_a_model_that_chooses_itself(self, make_served):
        served = await make_served(auto_tools=True, tool_parser="hermes", max_model_len=4096)
        served.script('<tool_call>{"name": "add", "arguments": {"b": 3}}</tool_call>', finish_reason="stop")
        (choice,) = (await served.stub.Chat(tools_request())).choices
        assert [c.function.arguments for c in choice.tool_calls] == ['{"b": 3}']

    async def test_conversations_with_calls(self, make_served):
        served = await make_served(trust_request_chat_template=True, max_model_len=4096)
        call = pb.ToolCall(id="c1", function=pb.CalledFunction(name="add", arguments='{"b": 1}'))
        messages = [
            pb.Message(role="assistant", tool_calls=[call], reasoning="hm"),
            pb.Message(role="tool", content="2", tool_call_id="c1", name="add"),
        ]
        template = (
            "{{ messages[0].tool_calls[0].id }} {{ messages[0].tool_calls[0].function.arguments.b + 1 }} "
            "{{ messages[0].reasoning_content }} {{ messages[1].tool_call_id }} {{ messages[1].name }}"
        )
        await served.stub.Chat(pb.ChatRequest(messages=messages, chat_template=template))
        assert served.tokenizer.decode(served.service.adds[0].prompt_token_ids, True) == "c1 2 hm c1 add"

    async def test_what_cannot_be_honoured_is_named(self, served):
        wrong = {
            "tool_choice": tools_request(),
            "tools[0].function.parameters": pb.ChatRequest(
                messages=[pb.Message(role="user", content="hi")],
                tools=[pb.Tool(function=pb.Function(name="f", parameters="{"))],
            ),
            "tools[0]": pb.ChatRequest(messages=[pb.Message(role="user", content="hi")], tools=[pb.Tool()]),
            "include_reasoning": tools_request(
                tool_choice=pb.ToolChoice(mode="none"), include_reasoning=False,
            ),
            "thinking_token_budget": tools_request(tool_choice=pb.ToolChoice(mode="none"), thinking_token_budget=4),
            "reasoning_effort": tools_request(tool_choice=pb.ToolChoice(mode="none"), reasoning_effort="much"),
        }  # fmt: skip
        for param, request in wrong.items():
            error = await refused(served.stub.Chat(request))
            assert error.trailing_metadata()["param"] == param, error
        for choice in (pb.ToolChoice(), pb.ToolChoice(mode="all"), pb.ToolChoice(function="nope")):
            error = await refused(served.stub.Chat(tools_request(tool_choice=choice)))
            assert error.trailing_metadata()["param"] == "tool_choice"
        assert served.service.adds == []


async def test_reasoning_is_told_apart(make_served):
    served = await make_served(reasoning_parser="qwen3")
    served.script("<think>hm", "m</think>", "yes", finish_reason="stop")
    answer = await served.chat()
    (choice,) = answer.choices
    assert (choice.reasoning, choice.text) == ("hmm", "yes")
    assert 0 < answer.usage.reasoning_tokens < answer.usage.completion_tokens
    pieces = [piece async for piece in served.stream_chat()]
    assert "".join(choice.reasoning for piece in pieces for choice in piece.choices) == "hmm"
    assert text_of(pieces) == "yes"
    request = chat_request()
    request.include_reasoning = False
    (choice,) = (await served.stub.Chat(request)).choices
    assert (choice.reasoning, choice.text) == ("", "yes")


class TestErrors:
    async def test_a_wrong_field_is_named(self, served):
        error = await refused(served.chat(temperature=3))
        assert "temperature" in error.details()
        assert error.trailing_metadata()["param"] == "temperature"
        await refused(served.complete(temperature=3))
        await refused(served.stub.Complete(pb.CompletionRequest()))
        error = await refused(served.complete("x" * 100))
        assert error.trailing_metadata()["code"] == "context_length_exceeded"
        await refused(anext(aiter(served.stream_chat(temperature=3))))

    async def test_numbers_that_json_lacks(self, served):
        odd = Struct()
        odd.update({"deep": [{"x": float("inf")}]})
        for name, value in {"temperature": float("nan"), "logit_bias": {5: float("inf")}, "vllm_xargs": odd}.items():
            error = await refused(served.complete(**{name: value}))
            assert error.trailing_metadata()["param"] == name
            await refused(_drain(served.stream_complete(**{name: value})))
        assert served.service.adds == []

    async def test_long_messages_fit_into_headers(self, served):
        served.service.refusal = Overloaded("\u4e00" * 20_000)
        error = await refused(served.complete(), StatusCode.UNAVAILABLE)
        assert error.details().startswith("\u4e00" * 100)

    async def test_codes(self, served):
        missing = completion_request()
        missing.model = "nope"
        await refused(served.stub.Complete(missing), StatusCode.NOT_FOUND)
        served.service.refusal = Overloaded("full", retry_after=3)
        error = await refused(served.complete(), StatusCode.UNAVAILABLE)
        assert error.trailing_metadata()["retry-after"] == "3"
        served.service.refusal = ReplicaLost("gone")
        await refused(served.complete(), StatusCode.UNAVAILABLE)

    async def test_an_error_in_a_stream(self, served):
        served.script("a", finish_reason="error")
        error = await refused(_drain(served.stream_complete()), StatusCode.INTERNAL)
        assert "script" in error.details()
        served.scripts(Script([[70]], failure=ReplicaLost("gone")))
        await refused(_drain(served.stream_chat()), StatusCode.UNAVAILABLE)

    async def test_unforeseen_ones_are_not_shown(self, served, monkeypatch):
        served.scripts(Script([[70]], failure=KeyError("secret")))
        error = await refused(served.complete(), StatusCode.INTERNAL)
        assert "secret" not in error.details()

        async def broken(scope, receive, send):
            raise KeyError("secret")

        monkeypatch.setattr(served.server._servicer, "_app", broken)
        error = await refused(served.complete(), StatusCode.INTERNAL)
        assert "secret" not in error.details()

    async def test_large_requests(self, make_served):
        served = await make_served(max_bytes=1000, max_body_bytes=1000)
        await refused(served.complete("x" * 2000), StatusCode.RESOURCE_EXHAUSTED)
        # Small as a message, large as JSON.
        await refused(served.complete("\x01" * 500), StatusCode.RESOURCE_EXHAUSTED)
        assert served.service.adds == []


@pytest.mark.option("api-key")
async def test_keys(make_served):
    served = await make_served(api_keys=("k1", "k2"))
    error = await refused(served.complete(), StatusCode.UNAUTHENTICATED)
    assert "API key" in error.details()
    for key, good in (("k2", True), ("k3", False)):
        call = served.stub.Chat(chat_request(), metadata=(("authorization", f"Bearer {key}"),))
        if good:
            assert (await call).choices
        else:
            await refused(call, StatusCode.UNAUTHENTICATED)


@pytest.mark.option("enable-request-id-headers")
async def test_request_ids(make_served):
    served = await make_served(request_id_headers=True)
    call = served.stub.Chat(chat_request(), metadata=(("x-request-id", "mine"),))
    answer = await call
    assert (await call.initial_metadata())["x-request-id"].startswith("mine")
    assert answer.id.startswith("chatcmpl-mine-")


class TestClientsThatLeave:
    @pytest.mark.parametrize("n", [1, 3])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_cancelling_aborts_at_once(self, served, stream, n):
        served.scripts(Script([served.ids("a")], hang=True))
        method = served.stub.StreamComplete if stream else served.stub.Complete
        call = method(completion_request(n=n))
        if stream:
            await call.read()
        await until(lambda: len(served.service.streams) == n and all(s.taken for s in served.service.streams))
        call.cancel()
        await until(lambda: [s.aborted for s in served.service.streams] == ["abort"] * n)

    async def test_deadlines_abort(self, served):
        served.scripts(Script([served.ids("a")], hang=True))
        call = served.stub.Complete(completion_request(), timeout=2)
        await refused(call, StatusCode.DEADLINE_EXCEEDED)
        await until(lambda: [s.aborted for s in served.service.streams] == ["abort"])

    async def test_while_queued(self, served):
        queued, submit = asyncio.Event(), served.service.submit

        async def noticed(adds):
            queued.set()
            return await submit(adds)

        served.service.submit, served.service.admission = noticed, 60
        call = served.stub.Complete(completion_request())
        await asyncio.wait_for(queued.wait(), 20)
        call.cancel()
        await until(lambda: served.service.cancelled == 1)

    async def test_nothing_is_taken_for_a_client_that_does_not_read(self, make_served, monkeypatch):
        monkeypatch.setattr("rayllm.api.fake.FakeStream", EndlessStream)
        served = await make_served(max_model_len=10**6)
        # Else the client's window grows to megabytes.
        options = [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(served.address, options=options) as channel:
            call = LLMStub(channel).StreamComplete(completion_request(logprobs=20, max_tokens=900_000))
            await call.read()
            (stream,), taken = served.service.streams, -1
            while taken != (taken := stream.taken):
                await asyncio.sleep(0.2)
            assert taken < 2_000
            call.cancel()
            await until(lambda: stream.aborted == "abort")


async def _drain(call):
    return [answer async for answer in call]
