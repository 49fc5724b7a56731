"""Anthropic's client."""

import anthropic
import pytest

from .conftest import FRANCE, MODEL


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


def test_tokens_are_counted(client):
    count = client.messages.count_tokens(model=MODEL, messages=FRANCE)
    usage = client.messages.create(**ask(max_tokens=1)).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors(client):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**ask(max_tokens=0))
    with pytest.raises(anthropic.NotFoundError, match="nope"):
        client.messages.create(**ask(model="nope"))
