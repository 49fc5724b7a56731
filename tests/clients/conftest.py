"""Clients as people install them, against one start of the real server."""

import pytest

from tests.launch import served
from tests.models import smollm2_gguf

MODEL = "demo"
FLAGS = (
    "--served-model-name", MODEL, "--max-model-len", "1024", "--dtype", "float32", "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",
)  # fmt: skip
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


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
