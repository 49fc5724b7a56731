"""`/v1/completions`."""

import base64
import io

import pytest
import torch

from rayllm.api.fake import Script
from rayllm.api.logprobs import bare
from rayllm.messages.engine import Embeds
from rayllm.messages.ingress import TokenLogprobs
from rayllm.render.embeds import mark

from .conftest import MAX_LEN, Harness, events, finish, joined, ok, refused


async def test_plain(api):
    api.script("Hello", ", world")
    body = ok(await api.complete())
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("Hello, world", "length", 0)
    assert choice["logprobs"] is None
    tokens = len(api.ids("Hello")) + len(api.ids(", world"))
    prompt = len(api.ids("hi"))
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": None,
    }


async def test_streamed_equals_plain(api):
    api.script("Hel", "lo", "", " 龜🫠", "!")
    plain = ok(await api.complete(max_tokens=40))["choices"][0]
    chunks = events(await api.complete(max_tokens=40, stream=True))
    assert joined(chunks) == plain["text"] == "Hello 龜🫠!"
    assert finish(chunks) == [plain["finish_reason"]]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("cut", range(1, 12))
async def test_a_character_cut_by_max_tokens_reads_the_same_streamed_and_not(api, cut):
    api.scripts(Script([[i] for i in api.ids("a龜🫠é")]))
    plain = ok(await api.complete(max_tokens=cut))["choices"][0]["text"]
    chunks = events(await api.complete(max_tokens=cut, stream=True))
    assert joined(chunks) == plain
    assert "a龜🫠é".startswith(plain.rstrip("\ufffd"))


async def test_prompts_and_choices_are_numbered_prompt_by_prompt(api):
    scripts = [Script([api.ids(text)]) for text in "abcd"]
    api.scripts(*scripts, *scripts, scripts[0])
    body = ok(await api.complete(prompt=["one", "two two"], n=2, echo=True, seed=1))
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in body["choices"]] == ["onea", "oneb", "two twoc", "two twod"]
    assert body["usage"]["prompt_tokens"] == len(api.ids("one")) + len(api.ids("two two"))
    assert [(a.choice_index, a.sampling.n, a.sampling.seed) for a in api.service.adds] == [
        (0, 1, 1), (1, 1, 1), (0, 1, 1), (1, 1, 1)]  # fmt: skip
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(await api.complete(prompt=["one", "two two"], n=2, echo=True, **options))
    for i, choice in enumerate(body["choices"]):
        assert joined(chunks, i) == choice["text"]
        assert finish(chunks, i) == ["length"]
    assert chunks[-1]["usage"] == body["usage"]


async def test_token_id_prompts(api):
    ids = api.ids("Hello")
    for prompt in (ids, [ids]):
        ok(await api.complete(prompt=prompt))
        assert api.service.adds[-1].prompt_token_ids == ids
    ok(await api.complete(prompt=[ids, api.ids("b")]))
    assert [a.prompt_token_ids for a in api.service.adds[-2:]] == [ids, api.ids("b")]


@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], None, ["", "a"], [1, "a"], [[1], 2], [True], [1.5], {"a": 1}, 3]
)
async def test_prompts_that_are_none(api, prompt):
    error = refused(await api.complete(prompt=prompt))
    assert "prompt" in error["message"]


async def test_ids_outside_the_vocabulary(api):
    for prompt in ([api.vocab], [-1], [[1, 2], [api.vocab + 5]]):
        assert refused(await api.complete(prompt=prompt))["param"] == "prompt"


class TestContext:
    async def test_too_long(self, api):
        for length in (MAX_LEN + 1, MAX_LEN):
            error = refused(await api.complete(prompt=[5] * length, max_tokens=1))
            assert str(MAX_LEN) in error["message"]
            assert error["code"] == "context_length_exceeded"

    async def test_exact_fit(self, api):
        ok(await api.complete(prompt=[5] * (MAX_LEN - 1), max_tokens=1))
        assert api.service.adds[0].sampling.max_tokens == 1

    async def test_more_output_than_the_context_is_refused(self, api):
        for stream in (False, True):
            error = refused(await api.complete(max_tokens=10 * MAX_LEN, stream=stream))
            assert str(MAX_LEN) in error["message"]

    async def test_the_default_is_16_or_what_is_left(self, api):
        await api.complete()
        await api.complete(prompt=[5] * (MAX_LEN - 3))
        assert [add.sampling.max_tokens for add in api.service.adds] == [16, 3]

    async def test_truncation_keeps_the_end(self, api):
        body = ok(await api.complete(prompt=list(range(3, 3 + MAX_LEN + 9)), truncate_prompt_tokens=4, echo=True))
        assert api.service.adds[0].prompt_token_ids == list(range(MAX_LEN + 8, MAX_LEN + 12))
        assert body["usage"]["prompt_tokens"] == 4
        refused(await api.complete(truncate_prompt_tokens=0))
        refused(await api.complete(truncate_prompt_tokens=MAX_LEN + 1))

    async def test_a_text_far_too_long_is_refused_unread(self, api):
        error = refused(await api.complete(prompt="word " * 10_000))
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_LEN) in error["message"]


class TestEcho:
    ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    @pytest.mark.parametrize("max_tokens", [3, 0])
    async def test_with_logprobs(self, api, max_tokens):
        api.scripts(Script([[i] for i in api.ids("abc")]))
        prompt = "The quick brown fox"
        params = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
        body = ok(await api.complete(**params))
        choice, lists = body["choices"][0], body["choices"][0]["logprobs"]
        assert body["usage"]["completion_tokens"] == max_tokens
        length = body["usage"]["prompt_tokens"] + max_tokens
        assert [len(lists[key]) for key in self.ARRAYS] == [length] * 4
        assert lists["token_logprobs"][0] is None
        assert lists["top_logprobs"][0] is None
        assert all(value <= 0 for value in lists["token_logprobs"][1:])
        assert choice["text"] == prompt + "abc"[:max_tokens] == "".join(lists["tokens"])
        assert choice["finish_reason"] == "length"
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert choice["text"].startswith(token, offset)
        chunks = events(await api.complete(**params, stream=True))
        assert joined(chunks) == choice["text"]
        for key in self.ARRAYS:
            assert [v for chunk in chunks for c in chunk["choices"] for v in c["logprobs"][key]] == lists[key]

    async def test_without_logprobs(self, api):
        api.script("a", "b")
        assert ok(await api.complete(prompt="hi ", echo=True))["choices"][0]["text"] == "hi ab"
        assert joined(events(await api.complete(prompt="hi ", echo=True, stream=True))) == "hi ab"
        assert ok(await api.complete(prompt=api.ids("hi"), echo=True, max_tokens=0))["choices"][0]["text"] == "hi"

    async def test_no_output_needs_echo(self, api):
        assert refused(await api.complete(max_tokens=0))["param"] == "max_tokens"


class TestLogprobs:
    async def test_layout(self, api):
        a, b = api.ids("a")[0], api.ids("b")[0]
        api.scripts(Script([[a], [b]]))
        lists = ok(await api.complete(logprobs=1))["choices"][0]["logprobs"]
        assert lists == {
            "tokens": ["a", "b"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
            "text_offset": [0, 1],
        }
        assert api.service.adds[0].sampling.logprobs == 1

    async def test_zero_reports_the_chosen_token(self, api):
        api.script("a")
        lists = ok(await api.complete(logprobs=0))["choices"][0]["logprobs"]
        assert lists["top_logprobs"] == [{"a": -0.5}]

    async def test_out_of_range(self, api):
        for value in (-1, 21, True, 1.5, "2"):
            assert refused(await api.complete(logprobs=value))["param"] == "logprobs"

    async def test_prompt_logprobs(self, api):
        choice = ok(await api.complete(prompt="hey", prompt_logprobs=1))["choices"][0]
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        ids = api.service.adds[0].prompt_token_ids
        for id_, entry in zip(ids[1:], rest, strict=True):
            assert entry[str(id_)]["rank"] == 1
            assert entry[str(id_)]["decoded_token"] == api.tokenizer.token_text(id_)
        assert refused(await api.complete(prompt_logprobs=1, stream=True))["param"] == "prompt_logprobs"

    async def test_tokens_as_ids(self, api):
        api.scripts(Script([[70]]))
        lists = ok(await api.complete(logprobs=0, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
        assert lists["tokens"] == ["token_id:70"]


class TestEndings:
    async def test_stop_string(self, api):
        api.scripts(Script([api.ids("one tw"), api.ids("o three"), api.ids(" four")]))
        body = ok(await api.complete(stop=["two"], max_tokens=30))
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "two")
        assert api.service.streams[-1].aborted == "stop"
        assert api.service.streams[-1].taken == 2
        chunks = events(await api.complete(stop="two", max_tokens=30, stream=True))
        assert joined(chunks) == "one "
        assert finish(chunks) == ["stop"]

    async def test_usage_counts_tokens_up_to_the_match(self, api):
        ids = api.ids("one tw") + api.ids("o") + api.ids(" three four")
        api.scripts(Script([ids]))
        body = ok(await api.complete(stop=["two"], max_tokens=40, logprobs=0))
        used = len(api.ids("one tw")) + len(api.ids("o"))
        assert body["usage"]["completion_tokens"] == used
        assert len(body["choices"][0]["logprobs"]["tokens"]) == used

    async def test_stop_string_in_output(self, api):
        api.script("one two", " three")
        body = ok(await api.complete(stop=["two"], include_stop_str_in_output=True))
        assert body["choices"][0]["text"] == "one two"

    async def test_no_stop_before_min_tokens(self, api):
        api.scripts(Script([[i] for i in api.ids("x.y.z")]))
        wanted = len(api.ids("x.")) + 1
        body = ok(await api.complete(stop=["."], min_tokens=wanted))
        assert body["choices"][0]["text"] == "x.y"

    async def test_text_held_back_comes_at_the_end(self, api):
        api.script("one t", "w")
        assert ok(await api.complete(stop=["two"]))["choices"][0]["text"] == "one tw"
        assert joined(events(await api.complete(stop=["two"], stream=True))) == "one tw"

    @pytest.mark.parametrize("stop", ["", ["", "x"]])
    async def test_empty_stop_is_refused(self, api, stop):
        assert refused(await api.complete(stop=stop))["param"] == "stop"

    @pytest.mark.parametrize("stop", [[], None])
    async def test_no_stop(self, api, stop):
        api.script("abc")
        assert ok(await api.complete(stop=stop))["choices"][0]["text"] == "abc"

    async def test_end_token(self, api):
        api.scripts(Script([[*api.ids("bye"), 0]], "stop", stop_token_id=0))
        body = ok(await api.complete())
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("bye", "stop", None)
        assert body["usage"]["completion_tokens"] == len(api.ids("bye")) + 1

    async def test_stop_token(self, api):
        end = api.ids("z")[0]
        for include, text in ((False, "ab"), (True, "abz")):
            api.scripts(Script([[*api.ids("ab"), end]], "stop", stop_token_id=end))
            body = ok(await api.complete(stop_token_ids=[end], include_stop_str_in_output=include))
            choice = body["choices"][0]
            assert (choice["text"], choice["stop_reason"]) == (text, end)

    async def test_special_tokens_in_the_text(self, api):
        api.scripts(Script([[*api.ids("a"), 1, *api.ids("b")]]))
        assert ok(await api.complete())["choices"][0]["text"] == "ab"
        assert ok(await api.complete(skip_special_tokens=False))["choices"][0]["text"] == "a<|user|>b"


async def test_fields_that_cannot_be_honoured(api):
    assert refused(await api.complete(suffix="x"))["param"] == "suffix"
    assert refused(await api.complete(best_of=3, n=2))["param"] == "best_of"
    ok(await api.complete(best_of=2, n=2, suffix=None))


async def test_token_ids_in_the_answer(api):
    api.scripts(Script([[70], [71]]))
    choice = ok(await api.complete(return_token_ids=True))["choices"][0]
    assert choice["token_ids"] == [70, 71]
    assert choice["prompt_token_ids"] == api.ids("hi")
    chunks = events(await api.complete(return_token_ids=True, stream=True))
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == [70, 71]
    assert [c["choices"][0]["prompt_token_ids"] for c in chunks] == [api.ids("hi"), None]


async def test_too_many_choices(api):
    assert refused(await api.complete(prompt=["a"] * 100, n=100))["param"] == "n"


def saved_rows(tokens: int) -> str:
    """Embeddings as clients send them."""
    file = io.BytesIO()
    torch.save(torch.ones(tokens, 4), file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.option("enable-prompt-embeds")
async def test_prompts_as_embeddings():
    """Answered before those of text, as clients of vLLM expect."""
    api = Harness(prompt_embeds=True)
    one, two = saved_rows(3), saved_rows(5)
    body = ok(await api.complete(prompt="", prompt_embeds=one, n=2, return_token_ids=True))
    assert body["usage"]["prompt_tokens"] == 3
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [None, None]
    assert [add.prompt_token_ids for add in api.service.adds] == [[0] * 3] * 2
    assert [add.prompt_embeds for add in api.service.adds] == [(Embeds(0, base64.b64decode(one)),)] * 2
    ok(await api.complete(prompt=None, prompt_embeds=[one, two]))
    assert [len(add.prompt_token_ids) for add in api.service.adds[2:]] == [3, 5]
    ok(await api.complete(prompt=["hi", "ho"], prompt_embeds=two))
    assert [bool(add.prompt_embeds) for add in api.service.adds[4:]] == [True, False, False]
    assert api.service.adds[5].prompt_token_ids == api.ids("hi")


async def test_embeddings_that_cannot_be_used_are_refused():
    one = saved_rows(3)
    assert "--enable-prompt-embeds" in refused(await Harness().complete(prompt="", prompt_embeds=one))["message"]
    api = Harness(prompt_embeds=True)
    for embeds in ("", "é", "x", "QUJD", one[:-40], 5, [1], [one, "QUJD"], {"a": 1}):
        assert refused(await api.complete(prompt="", prompt_embeds=embeds))["param"] == "prompt_embeds", embeds
    assert refused(await api.complete(prompt="", prompt_embeds=saved_rows(MAX_LEN + 1)))["param"] == "prompt"
    assert refused(await api.complete(prompt="", prompt_embeds=[]))["param"] == "prompt"
    for field, value in (("echo", True), ("prompt_logprobs", 0), ("truncate_prompt_tokens", 2)):
        assert refused(await api.complete(prompt="", prompt_embeds=one, **{field: value}))["param"] == field
    small = Harness(prompt_embeds=True, max_body_bytes=8000)
    assert refused(await small.complete(prompt="", prompt_embeds=one, n=8))["param"] == "prompt_embeds"
    assert refused(await api.chat(prompt_embeds=one))["param"] == "prompt_embeds"
    render = await api.post("/v1/completions/render", model="tiny", prompt="", prompt_embeds=one)
    assert refused(render)["param"] == "prompt_embeds"
    assert not api.service.adds


def parts(*contents):
    """A conversation whose texts in base64 are embeddings."""
    return [
        {"role": "user", "content": [
            {"type": "prompt_embeds", "data": part} if len(part) > 99 else {"type": "text", "text": part}
            for part in content
        ]}
        for content in contents
    ]  # fmt: skip


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


@pytest.mark.option("enable-prompt-embeds")
async def test_embeddings_as_parts_of_conversations():
    """They stand where a text in their place would."""
    api = Harness(prompt_embeds=True, trust_request_chat_template=True)
    one, two = saved_rows(3), saved_rows(5)
    files = [base64.b64decode(each) for each in (one, two)]
    body = {"chat_template": TEMPLATE, "add_generation_prompt": False, "max_tokens": 2}
    answer = ok(await api.chat(messages=parts(["a", one, "b"], [two]), n=2, return_token_ids=True, **body))
    assert answer["usage"]["prompt_tokens"] == len(api.service.adds[0].prompt_token_ids)
    assert answer["prompt_token_ids"] is None
    for add in api.service.adds:
        before, between, after = (api.ids(text) for text in ("<user>a\n", "\nb</><user>", "</>"))
        assert add.prompt_token_ids == [*before, 0, 0, 0, *between, 0, 0, 0, 0, 0, *after]
        at = len(before)
        assert add.prompt_embeds == (Embeds(at, files[0]), Embeds(at + 3 + len(between), files[1]))
    ok(await api.chat(messages=parts([one, one]), **{**body, "chat_template": "{{ messages[0].content }}"}))
    hole = [0, 0, 0]
    assert api.service.adds[-1].prompt_token_ids == [*hole, *api.ids("\n"), *hole]
    continued = [*parts(["a"]), {"role": "assistant", "content": [{"type": "prompt_embeds", "data": one}]}]
    ok(await api.chat(messages=continued, continue_final_message=True, chat_template=TEMPLATE, max_tokens=1))
    assert api.service.adds[-1].prompt_token_ids == [*api.ids("<user>a</><assistant>"), *hole]
    api.script("AB")
    streamed = events(await api.chat(messages=parts([one]), stream=True, **body))
    assert joined(streamed) == "AB"


async def test_parts_that_cannot_be_used_are_refused():
    one = saved_rows(3)
    error = refused(await Harness().chat(messages=parts([one])))
    assert "--enable-prompt-embeds" in error["message"]
    api = Harness(prompt_embeds=True, trust_request_chat_template=True)
    for data in (None, "", "é", "x", "QUJD", one[:-40], 5, [one], {"a": 1}):
        messages = [{"role": "user", "content": [{"type": "prompt_embeds", "data": data}]}]
        assert refused(await api.chat(messages=messages))["param"] == "prompt_embeds", data
    more = [{"role": "user", "content": [{"type": "prompt_embeds", "data": one, "detail": "low"}]}]
    assert "detail" in refused(await api.chat(messages=more))["message"]
    for field, value in (("echo", True), ("prompt_logprobs", 0), ("truncate_prompt_tokens", 2)):
        assert refused(await api.chat(messages=parts([one]), **{field: value}))["param"] == field
    refused(await api.chat(messages=parts([saved_rows(MAX_LEN + 1)])))
    # Templates that drop, repeat or swap contents, and a text that looks as what holds their place.
    for template in ("hi", "{{ messages[0].content * 2 }}", "{{ messages[1].content }}{{ messages[0].content }}"):
        assert "template" in refused(await api.chat(messages=parts([one], [one]), chat_template=template))["message"]
    assert "template" in refused(await api.chat(messages=parts([one, mark(0)])))["message"]
    ok(await api.chat(messages=parts([mark(0)]), chat_template="{{ messages[0].content }}"))
    for path in ("/tokenize", "/v1/chat/completions/render"):
        refused(await api.post(path, model="tiny", messages=parts([one])))
    assert len(api.service.adds) == 1


async def test_logprobs_of_tokens_that_are_asked_for(api):
    """In place of the likeliest, which a client that must give a number has asked for as well."""
    ok(await api.complete(logprobs=3, logprob_token_ids=[5, 6, 5]))
    ok(await api.chat(logprobs=True, logprob_token_ids=[7]))
    ok(await api.complete(logprobs=3, logprob_token_ids=[]))
    asked = [(add.sampling.logprobs, add.sampling.logprob_token_ids) for add in api.service.adds]
    assert asked == [(0, (5, 6)), (0, (7,)), (3, ())]
    for wrong in ([-1], [api.vocab], ["5"], 5, list(range(129))):
        assert refused(await api.complete(logprobs=1, logprob_token_ids=wrong))["param"] == "logprob_token_ids"
    assert refused(await api.complete(logprob_token_ids=[5]))["param"] == "logprob_token_ids"
    beams = await api.complete(logprobs=1, logprob_token_ids=[5], use_beam_search=True)
    assert refused(beams)["param"] == "logprob_token_ids"


async def test_a_request_says_how_often_it_hears(api):
    ok(await api.chat(stream_interval=7))
    assert api.service.adds[-1].sampling.stream_interval == 7
    for wrong in (0, -1, 1.5, "3", True):
        assert refused(await api.chat(stream_interval=wrong))["param"] == "stream_interval"


def test_ranks_of_tokens_that_were_asked_for():
    (entry,) = bare([TokenLogprobs(5, -1.0, 2, [6, 7], [-0.5, -3.0], [1, 9])])["content"]
    assert [one["rank"] for one in entry["top_logprobs"]] == [1, 9]
