"""LangChain's client of OpenAI's API."""

import pytest

from .conftest import FRANCE, MODEL, WEATHER, Weather


@pytest.fixture
def model(server):
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=24, max_retries=0
    )


def test_invoke_and_stream(model):
    answer = model.invoke(FRANCE[0]["content"])
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(FRANCE[0]["content"])) == answer.content


def test_batch(model):
    assert len(model.batch([[("system", "Be brief."), ("human", "Hi")]] * 3)) == 3


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model, method):
    typed = model.model_copy(update={"max_tokens": 100}).with_structured_output(Weather, method=method)
    assert isinstance(typed.invoke(WEATHER[0]["content"]), Weather)


@pytest.mark.parametrize("choice", ["any", "Weather"])
def test_tools(model, choice):
    bound = model.model_copy(update={"max_tokens": 100}).bind_tools([Weather], tool_choice=choice)
    answer = bound.invoke(WEATHER[0]["content"])
    call = answer.tool_calls[0]
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    first, *rest = bound.stream(WEATHER[0]["content"])
    for chunk in rest:
        first += chunk
    assert [one["args"] for one in first.tool_calls] == [one["args"] for one in answer.tool_calls]
    turns = [("human", WEATHER[0]["content"]), answer]
    turns += [{"role": "tool", "tool_call_id": one["id"], "content": "Sunny"} for one in answer.tool_calls]
    assert model.invoke(turns).usage_metadata["output_tokens"] > 0


async def test_responses(model, server):
    responses = model.model_copy(update={"use_responses_api": True})
    answer = await responses.ainvoke(FRANCE[0]["content"])
    assert "Paris" in answer.text
