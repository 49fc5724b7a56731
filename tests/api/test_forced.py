"""Tool calls that requests force: the form that engines get, and the calls that clients get."""

import json

import jsonschema
import pytest

from rayllm.api.forced import forced_calls

from .conftest import events, finish, ok, refused
from .test_parsing import make, script

POINT = {
    "properties": {"p": {"$ref": "#/$defs/point"}},
    "required": ["p"],
    "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
}
TOOLS = [
    {"type": "function", "function": {"name": "draw", "parameters": POINT}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "draw"}}


def schema_of(choice, parallel=True):
    return json.loads(forced_calls(TOOLS, choice, parallel).form.json)


@pytest.mark.parametrize(
    ("calls", "sound"),
    [
        ([{"name": "draw", "parameters": {"p": [1, 2]}}], True),
        ([{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}], True),
        ([], False),
        ([{"name": "draw", "parameters": {"p": [1]}}], False),
        ([{"name": "draw", "parameters": {}}], False),
        ([{"name": "now", "parameters": {"p": [1, 2]}}], False),
        ([{"name": "other", "parameters": {}}], False),
    ],
)
def test_the_schema_takes_calls_of_the_tools_alone(calls, sound):
    validator = jsonschema.Draft202012Validator(schema_of("required"))
    assert validator.is_valid(calls) == sound
    assert not jsonschema.Draft202012Validator(schema_of("required", parallel=False)).is_valid(calls * 2)


def test_a_named_function_s_own_schema():
    assert jsonschema.Draft202012Validator(schema_of(NAMED)).is_valid({"p": [1, 2]})
    assert not jsonschema.Draft202012Validator(schema_of(NAMED)).is_valid({"p": [1]})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "text", "meant"),
    [
        ("required", '[{"name": "draw", "parameters": {"p": [1, 2]}}, {"name": "now", "parameters": {}}]',
         [("draw", {"p": [1, 2]}), ("now", {})]),
        (NAMED, '{"p": [3, 4]}', [("draw", {"p": [3, 4]})]),
    ],
)  # fmt: skip
async def test_calls_are_read(stream, choice, text, meant):
    api = make(tools=None)
    script(api, text)
    reply = await api.chat(tools=TOOLS, tool_choice=choice, stream=stream, max_tokens=1000)
    sent = api.service.adds[0].sampling.structured_outputs
    assert (json.loads(sent.json), sent.field) == (schema_of(choice), "tool_choice")
    if not stream:
        (one,) = ok(reply)["choices"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in one["message"]["tool_calls"]]
        reasons = [one["finish_reason"]]
        assert one["message"]["content"] is None
    else:
        chunks = events(reply)
        names, arguments = {}, {}
        for chunk in chunks:
            for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
                names.setdefault(call["index"], call["function"].get("name"))
                arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
        calls = [(names[i], arguments[i]) for i in sorted(names)]
        reasons = finish(chunks)
    assert [(name, json.loads(text)) for name, text in calls] == meant
    # As OpenAI documents it: a client that named the function knows what the answer is.
    assert reasons == ["tool_calls" if choice == "required" else "stop"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": 5}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_what_cannot_be_forced_is_named(api, body, field):
    assert refused(await api.chat(**body))["param"] == field


async def test_a_form_waits_for_the_end_of_the_reasoning():
    api = make(tools=None, reasoning="deepseek_r1")
    script(api, "thoughts</think>{}")
    ok(await api.chat(response_format={"type": "json_object"}, max_tokens=1000))
    after = api.service.adds[0].sampling.structured_outputs.after_ids
    assert [api.tokenizer.decode(ids, continues=True) for ids in after] == ["</think>"]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>"}]
    more = {"continue_final_message": True, "max_tokens": 1000}
    ok(await api.chat(response_format={"type": "json_object"}, messages=messages, **more))
    assert api.service.adds[1].sampling.structured_outputs.after_ids == ()


@pytest.mark.parametrize(
    ("reasoning", "ends"),
    [
        ("granite", ["Here is my response:", "Here's my response:"]),
        ("kimi_k2", ["</think>", "<|tool_calls_section_begin|>"]),
    ],
)
async def test_each_way_of_ending_reasoning_ends_the_wait(reasoning, ends):
    api = make(tools=None, reasoning=reasoning)
    script(api, "{}")
    ok(await api.chat(response_format={"type": "json_object"}, max_tokens=1000))
    form = api.service.adds[0].sampling.structured_outputs
    assert [api.tokenizer.decode(ids, continues=True) for ids in form.after_ids] == ends


@pytest.mark.parametrize(
    "ask",
    [
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "[ab]"},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": NAMED},
    ],
)
async def test_a_form_holds_at_once_for_answers_without_reasoning(ask):
    api = make(tools=None, reasoning="qwen3")
    script(api, "{}")
    ok(await api.chat(**ask, max_tokens=1000))
    form = api.service.adds[0].sampling.structured_outputs
    assert [api.tokenizer.decode(ids, continues=True) for ids in form.begin_ids] == ["<think>"]
    assert [api.tokenizer.decode(ids, continues=True) for ids in form.after_ids] == ["</think>"]
