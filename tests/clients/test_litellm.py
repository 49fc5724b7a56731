"""LiteLLM, as a client of OpenAI's and of Anthropic's API."""

import json

import pytest

from .conftest import FRANCE, MODEL, TOOL, WEATHER, Weather

PROVIDERS = [("openai", "/v1"), ("hosted_vllm", "/v1"), ("anthropic", "")]


@pytest.fixture(scope="module")
def litellm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield pytest.importorskip("litellm")


@pytest.mark.parametrize(("provider", "path"), PROVIDERS)
def test_completion(litellm, server, provider, path):
    ask = {"model": f"{provider}/{MODEL}", "api_base": server.url + path, "api_key": "none", "messages": FRANCE,
           "temperature": 0, "max_tokens": 24}  # fmt: skip
    answer = litellm.completion(**ask)
    assert "Paris" in answer.choices[0].message.content
    chunks = litellm.completion(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content


@pytest.mark.parametrize(("provider", "path"), PROVIDERS)
def test_tools(litellm, server, provider, path):
    ask = {"model": f"{provider}/{MODEL}", "api_base": server.url + path, "api_key": "none", "messages": WEATHER,
           "temperature": 0, "max_tokens": 100, "tools": [TOOL], "tool_choice": "required"}  # fmt: skip
    calls = [call.function for call in litellm.completion(**ask).choices[0].message.tool_calls]
    assert calls[0].name == "Weather"
    # For vLLM it takes `additionalProperties` out of the schema, so that there may be more.
    assert json.loads(calls[0].arguments).keys() >= {"city", "unit"}
    joined = litellm.stream_chunk_builder(list(litellm.completion(**ask, stream=True)))
    again = [call.function for call in joined.choices[0].message.tool_calls]
    # Of Anthropic's whole answer, LiteLLM writes the JSON itself.
    assert [(c.name, json.loads(c.arguments)) for c in again] == [(c.name, json.loads(c.arguments)) for c in calls]


@pytest.mark.parametrize(("provider", "path"), PROVIDERS[:2])
def test_response_format(litellm, server, provider, path):
    answer = litellm.completion(
        model=f"{provider}/{MODEL}", api_base=server.url + path, api_key="none", messages=WEATHER, temperature=0,
        max_tokens=100, response_format=Weather,
    )  # fmt: skip
    Weather.model_validate_json(answer.choices[0].message.content)


def test_text_completion(litellm, server):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=f"{server.url}/v1", api_key="none",
        prompt="The capital of France is", temperature=0, max_tokens=4,
    )  # fmt: skip
    assert "Paris" in answer.choices[0].text
