"""Clients as people install them, against one start of the real server."""

from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.launch import served
from tests.models import smollm2_gguf

MODEL = "demo"
FLAGS = (
    "--served-model-name", MODEL, "--max-model-len", "1024", "--dtype", "float32", "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--enable-tokenizer-info-endpoint",
)  # fmt: skip
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(BaseModel):
    """Tell the weather in a city."""

    model_config = ConfigDict(extra="forbid")  # else a small model may invent properties without end
    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


SCHEMA = Weather.model_json_schema()
TOOL = {"type": "function", "function": {"name": "Weather", "description": Weather.__doc__, "parameters": SCHEMA}}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "clients":
            for name in ("slow", "server", "smollm2"):
                item.add_marker(name)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # clients' own


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    with served(smollm2_gguf(), *FLAGS, folder=folder, env={"RLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server
