"""OpenAI's older functions, and the conversations that they leave behind."""

import json

import pytest

from ..render.samples import byte_level
from .conftest import Harness, events, finish, ok, refused
from .test_parsing import CALLS, MEANT, TOOLS, make, script

FUNCTIONS = [tool["function"] for tool in TOOLS]


@pytest.fixture
def api() -> Harness:
    return make()


async def test_whole(api):
    script(api, CALLS)
    answer = ok(await api.chat(functions=FUNCTIONS))["choices"][0]
    message = answer["message"]
    call = message["function_call"]
    assert set(call) == {"name", "arguments"}
    assert (call["name"], json.loads(call["arguments"])) == MEANT[0]
    assert "tool_calls" not in message
    assert (message["content"], answer["finish_reason"]) == ("ok", "function_call")


async def test_streamed(api):
    script(api, CALLS)
    chunks = events(await api.chat(functions=FUNCTIONS, function_call="auto", stream=True))
    calls = [c["delta"]["function_call"] for x in chunks for c in x["choices"] if "function_call" in c["delta"]]
    assert [call["name"] for call in calls if "name" in call] == ["add"]
    assert json.loads("".join(call["arguments"] for call in calls)) == MEANT[0][1]
    assert not any("tool_calls" in c["delta"] for x in chunks for c in x["choices"])
    assert finish(chunks) == ["function_call"]


@pytest.mark.parametrize("stream", [False, True])
async def test_named(stream):
    api = make(tools=None)
    script(api, '{"a": 1}')
    reply = await api.chat(functions=FUNCTIONS, function_call={"name": "add"}, stream=stream)
    assert api.service.adds[0].sampling.structured_outputs.json is not None
    if stream:
        assert finish(events(reply)) == ["stop"]
        return
    (choice,) = ok(reply)["choices"]
    assert choice["message"]["function_call"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "stop")


async def test_none(api):
    script(api, CALLS)
    for body in ({"functions": FUNCTIONS, "function_call": "none"}, {"function_call": "none"}, {"functions": []}):
        answer = ok(await api.chat(**body))["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (CALLS, "stop")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"function_call": "auto"}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {"name": "other"}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {"name": 5}}, "function_call"),
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions"),
        ({"functions": FUNCTIONS, "tool_choice": "auto"}, "functions"),
        ({"functions": [{"parameters": {}}]}, "functions[0]"),
        ({"functions": [{"name": "f", "parameters": 5}]}, "functions[0]"),
    ],
)
async def test_refused(api, body, field):
    assert refused(await api.chat(**body))["param"] == field


async def test_no_parser():
    error = refused(await make(tools=None).chat(functions=FUNCTIONS))
    assert error["param"] == "function_call"


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.name }}:{{ m.tool_call_id }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.name }}({{ c.function.arguments.a }}){% endfor %};"
    "{% endfor %}"
)


async def test_conversations():
    api = Harness(tokenizer=byte_level(TEMPLATE), max_model_len=4096)
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 7}'}},
        {"role": "function", "name": "add", "content": "8"},
        {"role": "assistant", "content": "It is 8.", "function_call": None},
        {"role": "function", "name": "add", "content": None},
    ]
    ok(await api.chat(messages=messages))
    assert api.tokenizer.decode(api.service.adds[0].prompt_token_ids) == (
        "user:::add;assistant:::call00001=add(7);tool:add:call00001:8;assistant:::It is 8.;tool:add:call00001:;"
    )
    for wrong in (5, {"name": 5}, {"name": "f", "arguments": 5}):
        messages[1]["function_call"] = wrong
        assert "messages[1]" in refused(await api.chat(messages=messages))["param"]
    messages[1] |= {"function_call": {"name": "f"}, "tool_calls": [{"function": {"name": "f"}}]}
    assert refused(await api.chat(messages=messages))["param"] == "messages[1]"
