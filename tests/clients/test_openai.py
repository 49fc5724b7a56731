"""OpenAI's client."""

import openai
import pytest

from .conftest import FRANCE, MODEL, SCHEMA, TOOL, WEATHER, Weather


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


def ask_weather(**more):
    return {"model": MODEL, "messages": WEATHER, "temperature": 0, "max_completion_tokens": 100, **more}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "Weather"}}])
def test_tools(client, choice):
    """However the call comes about, the pieces of a stream join to the whole."""
    ask = ask_weather(tools=[TOOL], tool_choice=choice)
    whole = client.chat.completions.create(**ask).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    text, streamed, finish = "", [], None
    for chunk in client.chat.completions.create(**ask, stream=True):
        for piece in chunk.choices:
            text += piece.delta.content or ""
            finish = finish or piece.finish_reason
            for part in piece.delta.tool_calls or ():
                if part.index == len(streamed):
                    streamed.append((part.function.name, ""))
                name, arguments = streamed[part.index]
                streamed[part.index] = name, arguments + (part.function.arguments or "")
    assert (text, streamed, finish) == (whole.message.content or "", calls, whole.finish_reason)
    if choice != "auto":
        assert {name for name, _ in calls} == {"Weather"}
        Weather.model_validate_json(calls[0][1])


def test_results_of_tools_go_back(client):
    asked = client.chat.completions.create(**ask_weather(tools=[TOOL], tool_choice="required")).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny"} for call in asked.tool_calls]
    told = client.chat.completions.create(**ask_weather(messages=[*WEATHER, asked, *results], tools=[TOOL]))
    assert told.usage.completion_tokens > 0


def test_parse(client):
    ask = ask_weather(response_format=Weather)
    whole = client.chat.completions.parse(**ask).choices[0].message.parsed
    assert isinstance(whole, Weather)
    with client.chat.completions.stream(**ask) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole
    tools = [openai.pydantic_function_tool(Weather)]
    called = client.chat.completions.parse(**ask_weather(tools=tools, tool_choice="required"))
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


def test_responses_parse_and_tools(client):
    ask = {"model": MODEL, "input": WEATHER, "temperature": 0, "max_output_tokens": 100}
    assert isinstance(client.responses.parse(**ask, text_format=Weather).output_parsed, Weather)
    tool = {"type": "function", "name": "Weather", "description": Weather.__doc__, "parameters": SCHEMA, "strict": True}
    answer = client.responses.create(**ask, tools=[tool], tool_choice="required")
    calls = [item for item in answer.output if item.type == "function_call"]
    Weather.model_validate_json(calls[0].arguments)
    with client.responses.stream(**ask, tools=[tool], tool_choice="required") as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == "".join(call.arguments for call in calls)
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"} for call in calls]
    told = client.responses.create(**{**ask, "input": results}, previous_response_id=answer.id, tools=[tool])
    assert told.usage.input_tokens > answer.usage.input_tokens


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
