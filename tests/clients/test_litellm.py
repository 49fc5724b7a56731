"""LiteLLM, as a client of OpenAI's and of Anthropic's API."""

import pytest

from .conftest import FRANCE, MODEL


@pytest.fixture(scope="module")
def litellm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield pytest.importorskip("litellm")


@pytest.mark.parametrize(("provider", "path"), [("openai", "/v1"), ("hosted_vllm", "/v1"), ("anthropic", "")])
def test_completion(litellm, server, provider, path):
    ask = {"model": f"{provider}/{MODEL}", "api_base": server.url + path, "api_key": "none", "messages": FRANCE,
           "temperature": 0, "max_tokens": 24}  # fmt: skip
    answer = litellm.completion(**ask)
    assert "Paris" in answer.choices[0].message.content
    chunks = litellm.completion(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content


def test_text_completion(litellm, server):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=f"{server.url}/v1", api_key="none",
        prompt="The capital of France is", temperature=0, max_tokens=4,
    )  # fmt: skip
    assert "Paris" in answer.choices[0].text
