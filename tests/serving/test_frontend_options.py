"""Options of the front end on the real server, as far as it takes one to see them: two starts for all of them."""

import json
import time

import httpx
import pytest

from tests.launch import served
from tests.models import make_tiny, smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One engine behind two HTTP processes."""
    flags = (
        "--served-model-name", "a", "b", "--api-server-count", "2", "--max-model-len", "1024",
        "--enable-log-requests", "--enable-log-outputs", "--no-enable-log-deltas", "--max-log-len", "10",
        "--log-error-stack", "--enable-server-load-tracking", "--enable-prompt-tokens-details",
        "--enable-tokenizer-info-endpoint", "--renderer-num-workers", "2",
    )  # fmt: skip
    variables = {"RLLM_LOGGING_LEVEL": "DEBUG", "RLLM_LOGING_LEVEL": "WARNING"}
    with served(smollm2_gguf(), *flags, folder=tmp_path_factory.mktemp("front"), env=variables) as one:
        wait_for(lambda: "server 1 is up" in one.log.read_text())
        yield one


def wait_for(condition, timeout_s=20):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def complete(server, **body):
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once upon a time", **body}, timeout=120)


def loads(server):
    """What /load says to several connections, which both processes answer."""
    return [httpx.get(f"{server.url}/load", timeout=120, verify=False).json()["server_load"] for _ in range(6)]


@pytest.mark.smollm2
@pytest.mark.option("enable-log-requests", "enable-log-outputs", "max-log-len", "log-error-stack")
def test_logs(server):
    prompt = "Tell me about the sea. " * 40
    reply = complete(server, prompt=prompt, temperature=0, max_tokens=8).json()
    assert complete(server, temperature=9).status_code == 400
    wait_for(lambda: "Traceback" in server.log.read_text())
    log = server.log.read_text()
    of_it = [line for line in log.splitlines() if reply["id"] in line]
    asked, shown, given = of_it
    assert "temperature=0" in asked
    assert f"prompt {prompt[:10]!r}, token ids [" in shown
    assert repr(reply["choices"][0]["text"]) in given
    assert prompt not in log


@pytest.mark.smollm2
@pytest.mark.option("fail-on-environ-validation")
def test_an_unknown_variable_was_a_warning(server):
    assert "RLLM_LOGING_LEVEL: is no variable of rayllm; did you mean RLLM_LOGGING_LEVEL?" in server.log.read_text()


@pytest.mark.smollm2
@pytest.mark.option("enable-server-load-tracking")
def test_every_http_process_tells_the_load_of_all(server):
    body = {"prompt": "Once", "n": 8, "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as stream:
        lines = stream.iter_lines()  # without a name it would be closed at once, and the stream with it
        next(lines)
        wait_for(lambda: loads(server) == [8] * 6)  # once all eight choices have begun
    wait_for(lambda: loads(server) == [0] * 6)


@pytest.mark.smollm2
@pytest.mark.option("enable-prompt-tokens-details", "served-model-name", "enable-tokenizer-info-endpoint")
def test_caching_names_and_tokenizer(server):
    for name in ("a", "b"):
        reply = complete(server, model=name, prompt="The quick brown fox. " * 20, max_tokens=1).json()
        assert reply["model"] == "a"
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert server.metric("vllm:generation_tokens_total", model_name="a") > 0
    info = httpx.get(f"{server.url}/tokenizer_info", timeout=120).json()
    assert info["tokenizer_class"] == "GPT2Tokenizer"
    assert "messages" in info["chat_template"]


@pytest.mark.option("skip-tokenizer-init", "generation-config")
def test_a_model_without_a_tokenizer(tmp_path):
    folder = make_tiny("llama", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 5}))
    with served(folder, "--skip-tokenizer-init", folder=tmp_path) as server:
        reply = complete(server, prompt=[1, 2, 3], max_tokens=50, ignore_eos=True)
        (choice,) = reply.json()["choices"]
        assert len(choice["token_ids"]) == 5
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert complete(server, prompt="text").status_code == 400
