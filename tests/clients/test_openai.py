"""OpenAI's client."""

import openai
import pytest

from .conftest import FRANCE, MODEL


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_completion_tokens=24)
    assert "Paris" in answer.choices[0].message.content
    stream = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_completion_tokens=24, stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in stream) == answer.choices[0].message.content


def test_completions(client):
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=2, echo=True
    )
    assert answer.choices[0].text.startswith("The capital of France is Paris")
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.total_tokens


def test_responses(client):
    first = client.responses.create(model=MODEL, input=FRANCE[0]["content"], temperature=0, max_output_tokens=24)
    assert "Paris" in first.output_text
    with client.responses.stream(
        model=MODEL, input=FRANCE[0]["content"], temperature=0, max_output_tokens=24
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == first.output_text
    second = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=8
    )
    assert second.usage.input_tokens > first.usage.total_tokens
    assert client.responses.retrieve(second.id) == second


def test_background(client):
    running = client.responses.create(
        model=MODEL, input="Count", background=True, max_output_tokens=500, extra_body={"ignore_eos": True}
    )
    assert running.status == "in_progress"
    assert client.responses.cancel(running.id).status == "cancelled"


def test_beams(client):
    ask = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 6, "logprobs": 0}
    greedy = client.completions.create(**ask)
    beams = client.completions.create(**ask, n=4, extra_body={"use_beam_search": True, "length_penalty": 0})
    totals = [sum(choice.logprobs.token_logprobs) for choice in beams.choices]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] >= sum(greedy.choices[0].logprobs.token_logprobs) - 1e-4
    assert len({choice.text for choice in beams.choices}) == 4


def test_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=3)
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.responses.create(model="nope", input="hi")


def test_trainers_pause_and_resume(client, server):
    import httpx

    with httpx.Client(base_url=server.url, timeout=60) as plain:
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            assert plain.post(path).status_code == 200
        names = plain.post("/collective_rpc", json={"method": "logits_processor_names"})
        assert names.json()["results"] == [[]]
    test_completions(client)
