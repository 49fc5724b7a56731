"""LangChain's client of OpenAI's API."""

import pytest

from .conftest import FRANCE, MODEL


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


async def test_responses(model, server):
    responses = model.model_copy(update={"use_responses_api": True})
    answer = await responses.ainvoke(FRANCE[0]["content"])
    assert "Paris" in answer.text
