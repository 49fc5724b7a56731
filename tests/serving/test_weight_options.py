"""Options about the model's files, in the engine of the real server."""

import httpx
import pytest

from tests.launch import served
from tests.models import tiny_chat

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.smollm2]


@pytest.mark.option(
    "model", "dtype", "hf-overrides", "use-tqdm-on-load", "safetensors-load-strategy", "model-loader-extra-config"
)
def test_one_start_with_many(tmp_path):
    model = tiny_chat(tmp_path / "model")
    flags = (
        "--dtype", "bfloat16", "--max-model-len", "512", "--hf-overrides.num_hidden_layers", "1",
        "--safetensors-load-strategy", "eager", "--model-loader-extra-config.num_threads", "2",
    )  # fmt: skip
    with served(model, *flags, folder=tmp_path) as server:
        assert httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]["id"] == str(model)
        ask = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
        reply = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60).json()
        assert reply["model"] == str(model)
        assert reply["usage"]["completion_tokens"] == 3
        assert server.metric("vllm:generation_tokens_total", model_name=str(model)) == 3
        log = server.log.read_text(errors="replace")
    assert "read 1 layers from 1 files of safetensors with strategy eager, 2 threads in" in log
    assert "as torch.bfloat16" in log
    assert "Loading weights: 100%" in log
