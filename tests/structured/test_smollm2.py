"""Forms on a real model and its vocabulary."""

import json

import jsonschema
import pytest

from rayllm import LLM, SamplingParams, StructuredOutputs
from tests.models import smollm2_gguf

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "inhabitants": {"type": "integer", "minimum": 1},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "country", "inhabitants", "rivers"],
    "additionalProperties": False,
}


@pytest.mark.smollm2
def test_a_real_model_fills_a_schema_in() -> None:
    question = [{"role": "user", "content": "Describe the city of Paris as JSON."}]
    forms = (
        StructuredOutputs(json=CITY, disable_any_whitespace=True),
        StructuredOutputs(choice=("London", "Paris", "Rome")),
        StructuredOutputs(regex=r"[A-Z][a-z]+( [a-z]+){2,6}\."),
    )
    sampling = [SamplingParams(temperature=0.0, max_tokens=300, structured_outputs=form) for form in forms]
    sampling.append(SamplingParams(temperature=2.0, seed=1, max_tokens=300, structured_outputs=forms[0]))
    with LLM(str(smollm2_gguf()), max_model_len=512, kv_cache_memory_bytes="128M") as llm:
        outputs = [result.outputs[0] for result in llm.chat([question] * 4, sampling)]
    assert all(output.finish_reason == "stop" for output in outputs)
    likely, choice, sentence, odd = (output.text for output in outputs)
    jsonschema.validate(json.loads(likely), CITY)
    jsonschema.validate(json.loads(odd), CITY)
    assert json.loads(likely)["country"] == "France"
    assert choice == "Paris"
    assert sentence.endswith(".")
