"""`/v1/chat/completions`."""

import pytest

from rayllm.api.fake import Script
from rayllm.errors import ConfigError

from ..render.samples import byte_level, sentencepiece
from .conftest import MAX_LEN, Harness, events, finish, joined, ok, refused

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def test_plain(api):
    api.script("Hello", ", world")
    body = ok(await api.chat())
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert api.tokenizer.decode(api.service.adds[0].prompt_token_ids, False) == "<|user|>hi<|end|><|assistant|>"
    assert body["usage"]["prompt_tokens"] == len(api.service.adds[0].prompt_token_ids)


async def test_streamed_equals_plain(api):
    api.script("Hel", "lo", " 龜🫠")
    chunks = events(await api.chat(stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks) == "Hello 龜🫠"
    assert not any("\ufffd" in c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])
    assert finish(chunks) == ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


class TestUsage:
    @pytest.mark.parametrize("options", [{}, {"stream_options": {}}, {"stream_options": None}])
    async def test_not_unless_asked(self, api, options):
        assert all(chunk.get("usage") is None for chunk in events(await api.chat(stream=True, **options)))

    async def test_one_chunk_at_the_end(self, api):
        chunks = events(await api.chat(stream=True, stream_options={"include_usage": True}))
        assert [i for i, chunk in enumerate(chunks) if chunk.get("usage")] == [len(chunks) - 1]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == ok(await api.chat())["usage"]

    async def test_in_every_chunk(self, api):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events(await api.chat(stream=True, stream_options=options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, 3)

    async def test_options_need_a_stream(self, api):
        assert refused(await api.chat(stream_options={"include_usage": True}))["param"] == "stream_options"

    async def test_cached_tokens(self, make_api):
        body = ok(await make_api(prompt_tokens_details=True).chat())
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


class TestLogprobs:
    async def test_layout(self, api):
        ids = api.ids("é")
        assert len(ids) == 1
        api.scripts(Script([[70], ids]))
        for alternatives in (0, 2):
            more = {"top_logprobs": alternatives} if alternatives else {}
            entries = ok(await api.chat(logprobs=True, **more))["choices"][0]["logprobs"]["content"]
            assert [e["token"] for e in entries] == [api.tokenizer.token_text(70), "é"]
            assert bytes(entries[1]["bytes"]) == "é".encode()
            assert all(len(e["top_logprobs"]) == alternatives and e["logprob"] == -0.5 for e in entries)
        assert entries[1]["top_logprobs"][0] == {"token": "é", "logprob": -0.5, "bytes": list("é".encode())}

    async def test_bytes_join_to_the_text(self, api):
        api.scripts(Script([[i] for i in api.ids("a 龜🫠é")] + [[0]], "stop", stop_token_id=0))
        choice = ok(await api.chat(logprobs=True))["choices"][0]
        data = b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["content"])
        assert data == choice["message"]["content"].encode() + b"<|end|>"

    async def test_streamed_equal_plain(self, api):
        api.scripts(Script([[i] for i in api.ids("a 龜🫠é")]))
        plain = ok(await api.chat(logprobs=True, top_logprobs=3))["choices"][0]["logprobs"]["content"]
        chunks = events(await api.chat(logprobs=True, top_logprobs=3, stream=True))
        choices = [c for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
        assert [e for c in choices for e in c["logprobs"]["content"]] == plain

    @pytest.mark.parametrize("more", [{"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21},
                                      {"logprobs": True, "top_logprobs": -1}, {"logprobs": 1}])  # fmt: skip
    async def test_refused(self, api, more):
        refused(await api.chat(**more))

    async def test_no_infinities(self, api):
        from rayllm.api.logprobs import LogprobsWriter
        from rayllm.messages.ingress import TokenLogprobs

        token = TokenLogprobs(70, float("-inf"), 1, [70, 71], [float("-inf"), float("nan")])
        entry = LogprobsWriter(api.tokenizer, False).chat([token])["content"][0]
        assert entry["logprob"] == -9999.0
        assert entry["top_logprobs"][1]["logprob"] == -9999.0


class TestRendering:
    async def test_continue_final_message(self, api):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure"}]
        for more in ({}, {"add_generation_prompt": False}):
            api.script("!")
            body = ok(await api.chat(messages=messages, continue_final_message=True, echo=True, **more))
            prompt = api.tokenizer.decode(api.service.adds[-1].prompt_token_ids, False)
            assert prompt == "<|user|>hi<|end|><|assistant|>Sure"
            assert body["choices"][0]["message"] == {"role": "assistant", "content": "Sure!", "refusal": None}
        error = refused(await api.chat(messages=messages, continue_final_message=True, add_generation_prompt=True))
        assert error["param"] == "continue_final_message"

    async def test_echo_needs_the_same_role(self, api):
        api.script("!")
        assert ok(await api.chat(echo=True))["choices"][0]["message"]["content"] == "!"

    async def test_template_of_the_request(self, api, make_api):
        assert refused(await api.chat(chat_template="x"))["param"] == "chat_template"
        trusting = make_api(trust_request_chat_template=True)
        ok(await trusting.chat(chat_template="xyz"))
        assert trusting.tokenizer.decode(trusting.service.adds[0].prompt_token_ids) == "xyz"

    async def test_template_variables(self, make_api):
        api = make_api(tokenizer=byte_level("{{ mood }}{{ documents | length }}"))
        ok(await api.chat(chat_template_kwargs={"mood": "glad"}, documents=[{"text": "a"}]))
        assert api.tokenizer.decode(api.service.adds[0].prompt_token_ids) == "glad1"
        assert refused(await api.chat(chat_template_kwargs={"tone": 1}))["param"] == "chat_template_kwargs"

    async def test_special_tokens(self, make_api):
        trusting = make_api(tokenizer=sentencepiece(), trust_request_chat_template=True)
        for add in (True, False):
            ok(await trusting.chat(chat_template="the", add_special_tokens=add))
            assert (1 in trusting.service.adds[-1].prompt_token_ids) == add

    async def test_no_template(self, make_api):
        api = make_api(tokenizer=byte_level(template=None))
        assert "template" in refused(await api.chat())["message"]
        ok(await api.complete())

    @pytest.mark.parametrize("messages", [None, [], "hi", [1], [{"role": "user"}], [{"role": "user", "content": 1}],
                                          [{"role": "user", "content": [{"type": "text", "text": 5}]}]])  # fmt: skip
    async def test_malformed(self, api, messages):
        assert "messages" in refused(await api.chat(messages=messages))["message"]

    async def test_too_long(self, api):
        for stream in (False, True):
            error = refused(await api.chat(messages=[{"role": "user", "content": "a b " * 60}], stream=stream))
            assert error["code"] == "context_length_exceeded"
            assert str(MAX_LEN) in error["message"]


class TestTools:
    async def test_none_renders_them(self, make_api):
        api = make_api(tokenizer=byte_level("{{ tools[0].function.name }}"))
        ok(await api.chat(tools=TOOLS, tool_choice="none"))
        assert api.tokenizer.decode(api.service.adds[0].prompt_token_ids) == "add"

    @pytest.mark.parametrize("choice", [None, "auto", {"type": "function", "function": {"name": "other"}}])
    async def test_calls_are_refused(self, api, choice):
        assert refused(await api.chat(tools=TOOLS, tool_choice=choice))["param"] == "tool_choice"

    async def test_no_tools(self, api):
        ok(await api.chat(tools=[]))
        ok(await api.chat(tools=None, tool_choice="auto"))
        assert refused(await api.chat(tool_choice="required"))["param"] == "tool_choice"

    @pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"type": "function", "function": {}}, {"type": "x"}])
    async def test_malformed(self, api, tool):
        assert "tools" in refused(await api.chat(tools=[tool], tool_choice="none"))["message"]

    @pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a": 1, "b": ', "", '"text"', "null"])
    async def test_histories_with_calls(self, api, arguments):
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "zz", "content": [{"type": "text", "text": "no"}]},
            {"role": "user", "content": "b"},
        ]
        ok(await api.chat(messages=messages))
        events(await api.chat(messages=messages, stream=True))


class TestFields:
    async def test_max_completion_tokens(self, api):
        ok(await api.chat(max_completion_tokens=3, max_tokens=5))
        ok(await api.chat(max_tokens=5))
        ok(await api.chat())
        room = MAX_LEN - len(api.service.adds[0].prompt_token_ids)
        assert [add.sampling.max_tokens for add in api.service.adds] == [3, 5, room]
        refused(await api.chat(max_tokens=0))

    async def test_n(self, api):
        api.scripts(*(Script([api.ids(text)]) for text in "abcabcabc"))
        body = ok(await api.chat(n=3, seed=7))
        assert [c["message"]["content"] for c in body["choices"]] == ["a", "b", "c"]
        assert [(a.choice_index, a.sampling.seed) for a in api.service.adds] == [(0, 7), (1, 7), (2, 7)]
        chunks = events(await api.chat(n=3, stream=True))
        assert [joined(chunks, i) for i in range(3)] == ["a", "b", "c"]

    async def test_a_seed_is_drawn(self, api):
        await api.chat()
        await api.chat()
        first, second = (add.sampling.seed for add in api.service.adds)
        assert first != second

    async def test_drawn_seeds_repeat_with_the_server_s_seed(self):
        drawn = []
        for seed in (5, 5, 6):
            api = Harness(seed=seed)
            api.script("x")
            for _ in range(2):
                ok(await api.chat())
            drawn.append([add.sampling.seed for add in api.service.adds])
        assert drawn[0] == drawn[1]
        assert not set(drawn[0]) & set(drawn[2])

    async def test_clients_extras_that_ask_for_nothing(self, api):
        ok(await api.chat(user="u", metadata={"a": "b"}, store=False, service_tier="auto", modalities=["text"],
                          response_format={"type": "text"}, parallel_tool_calls=True, logit_bias={}, stop=None,
                          prompt_cache_key="k", functions=None, reasoning_effort=None, stream=False))  # fmt: skip

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("early_stopping", True),
            ("length_penalty", 2),
            ("audio", {"voice": "x"}),
            ("modalities", ["audio"]),
            ("service_tier", "flex"),
            ("reasoning_effort", "low"),
            ("prompt_embeds", "x"),
            ("function_call", "auto"),
            ("temprature", 0.5),
            ("priority", 3),
            ("cache_salt", ""),
        ],
    )
    async def test_what_cannot_be_honoured_is_named(self, api, field, value):
        error = refused(await api.chat(**{field: value}))
        assert error["param"] == field
        assert field in error["message"]

    async def test_the_tier_is_told_where_it_is_asked_for(self, api):
        for tier in ("auto", "default"):
            assert ok(await api.chat(service_tier=tier))["service_tier"] == "default"
            assert ok(await api.complete(service_tier=tier))["service_tier"] == "default"
        assert "service_tier" not in ok(await api.chat())

    async def test_truncation(self, api):
        whole = ok(await api.chat()) and api.service.adds[-1].prompt_token_ids
        for side, kept in ((None, whole[-2:]), ("left", whole[-2:]), ("right", whole[:2])):
            ok(await api.chat(truncate_prompt_tokens=2, truncation_side=side))
            assert api.service.adds[-1].prompt_token_ids == kept
        assert refused(await api.chat(truncation_side="left"))["param"] == "truncation_side"

    async def test_a_misspelt_field_gets_a_hint(self, api):
        assert "'temperature'" in refused(await api.chat(temprature=0.5))["message"]

    async def test_passed_on(self, make_api):
        api = make_api(priority_scheduling=True)
        ok(await api.chat(priority=-2, cache_salt="s", vllm_xargs={"a": 1}, top_k=-1, bad_words=["the"]))
        add = api.service.adds[0]
        assert (add.priority, add.cache_salt, add.sampling.extra_args, add.sampling.top_k) == (-2, "s", {"a": 1}, 0)
        spelled = {api.tokenizer.decode(ids, continues=True) for ids in add.sampling.bad_words_ids}
        assert spelled == {"the", " the"}

    async def test_defaults_of_the_model(self, make_api):
        defaults = {"temperature": 0.6, "top_k": 5, "max_tokens": 9, "repetition_penalty": 1.1}
        api = make_api(generation_defaults=defaults)
        ok(await api.chat())
        ok(await api.chat(temperature=0, top_k=0, max_tokens=2, repetition_penalty=1))
        first, second = (add.sampling for add in api.service.adds)
        assert (first.temperature, first.top_k, first.max_tokens, first.repetition_penalty) == (0.6, 5, 9, 1.1)
        assert (second.temperature, second.top_k, second.max_tokens, second.repetition_penalty) == (0, 0, 2, 1)
        ok(await api.complete())
        assert api.service.adds[2].sampling.max_tokens == 9

    @pytest.mark.parametrize("defaults", [{"temperature": 9}, {"top_p": 0}, {"max_tokens": -1}, {"stop": ""}])
    async def test_defaults_out_of_range_end_the_start(self, make_api, defaults):
        with pytest.raises(ConfigError, match=next(iter(defaults))):
            make_api(generation_defaults=defaults)

    async def test_token_ids_in_the_answer(self, api):
        api.scripts(Script([[70], [71]]))
        body = ok(await api.chat(return_token_ids=True))
        assert body["choices"][0]["token_ids"] == [70, 71]
        assert body["prompt_token_ids"] == api.service.adds[0].prompt_token_ids
        for options in ({}, {"include_usage": True}, {"continuous_usage_stats": True}):
            chunks = events(await api.chat(return_token_ids=True, stream=True, stream_options=options))
            assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
            assert [i for c in chunks[1:] for x in c["choices"] for i in x["token_ids"]] == [70, 71]

    async def test_prompt_logprobs(self, api):
        body = ok(await api.chat(prompt_logprobs=0))
        assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
