"""Anthropic's client."""

import anthropic
import pytest

from .conftest import FRANCE, MODEL, SCHEMA, WEATHER, Weather

TOOL = {"name": "Weather", "description": Weather.__doc__, "input_schema": SCHEMA}


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def ask(**more):
    return {"model": MODEL, "max_tokens": 24, "messages": FRANCE, "extra_body": {"temperature": 0}, **more}


def test_messages(client):
    message = client.messages.create(**ask(system="You know geography."))
    assert "Paris" in message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**ask(system="You know geography.")) as stream:
        assert "".join(stream.text_stream) == message.content[0].text
        assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens


def test_stop_sequences(client):
    message = client.messages.create(**ask(stop_sequences=["Paris"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "Weather"}])
def test_tools(client, choice):
    ask_weather = ask(messages=WEATHER, max_tokens=100, tools=[TOOL], tool_choice=choice)
    message = client.messages.create(**ask_weather)
    assert message.stop_reason == "tool_use"
    calls = [block for block in message.content if block.type == "tool_use"]
    assert calls[0].name == "Weather"
    Weather.model_validate(calls[0].input)
    with client.messages.stream(**ask_weather) as stream:
        streamed = stream.get_final_message()
    assert [(b.name, b.input) for b in streamed.content if b.type == "tool_use"] == [(b.name, b.input) for b in calls]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"} for call in calls]
    turns = [*WEATHER, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    told = client.messages.create(**ask(messages=turns, tools=[TOOL]))
    assert told.usage.output_tokens > 0


def test_tokens_are_counted(client):
    count = client.messages.count_tokens(model=MODEL, messages=FRANCE)
    usage = client.messages.create(**ask(max_tokens=1)).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors(client):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**ask(max_tokens=0))
    with pytest.raises(anthropic.NotFoundError, match="nope"):
        client.messages.create(**ask(model="nope"))
