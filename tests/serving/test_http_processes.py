"""Options of the HTTP servers where several processes answer, as a user meets them."""

import json
import os
import re
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import trustme
import yaml

from tests.launch import served
from tests.models import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.smollm2]

MIDDLEWARE = """
import os


async def tell_process(request, call_next):
    response = await call_next(request)
    response.headers["x-process"] = str(os.getpid())
    return response
"""
STREAM = {"model": "b", "prompt": "Once", "max_tokens": 150, "ignore_eos": True, "stream": True}


@pytest.mark.option(
    "api-server-count", "config", "middleware", "ssl-certfile", "ssl-keyfile", "enable-ssl-refresh",
    "log-config-file", "disable-access-log-for-endpoints", "root-path", "shutdown-timeout",
)  # fmt: skip
def test_three_processes_do_as_the_file_says(tmp_path):
    authority = trustme.CA()
    renew(authority, tmp_path)
    (tmp_path / "middleware_of_a_test.py").write_text(MIDDLEWARE)
    (tmp_path / "logging.json").write_text(json.dumps(log_config(tmp_path / "log")))
    options = {
        "port": 1,
        "served-model-name": ["a", "b"],
        "max-model-len": 512,
        "api-server-count": 3,
        "middleware": ["middleware_of_a_test.tell_process"],
        "ssl-certfile": str(tmp_path / "cert"),
        "ssl-keyfile": str(tmp_path / "key"),
        "enable-ssl-refresh": True,
        "log-config-file": str(tmp_path / "logging.json"),
        "disable-access-log-for-endpoints": "/health,/metrics",
        "root-path": "/llm",
        "shutdown-timeout": 30,
    }
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(options))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    # The port that `served` gives on the command line beats that of the file.
    flags = ("--config", str(tmp_path / "serve.yaml"))
    with served(smollm2_gguf(), *flags, folder=tmp_path, env={"PYTHONPATH": path}, trust=trust) as server:

        def get(path):
            return httpx.get(server.url + path, verify=trust, timeout=30)

        wait_for(lambda: (tmp_path / "log").read_text().count(" is up\n") == 2)  # those beside the first
        wait_for(lambda: len(processes(get)) == 3)
        assert [card["id"] for card in get("/v1/models").json()["data"]] == ["a", "b"]
        assert get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
        renewed = renew(authority, tmp_path)
        wait_for(lambda: all(shown(server) == renewed for _ in range(12)))
        texts = []
        stream = threading.Thread(target=lambda: texts.extend(streamed(server, trust)))
        stream.start()
        wait_for(lambda: texts)
        assert texts[-1] != "[DONE]"
    stream.join(5)
    assert texts[-1] == "[DONE]"
    logged = (tmp_path / "log").read_text()
    access = re.findall(r"<(\d+) uvicorn.access> .*GET (\S+) HTTP", logged)
    assert {path for _, path in access} == {"/v1/models", "/llm/openapi.json"}
    assert len({process for process, _ in access}) == 3
    assert re.search(r"<\d+ rayllm.serving.launch> ", logged)


def log_config(file):
    return {
        "version": 1,
        "formatters": {"mine": {"format": "<%(process)d %(name)s> %(message)s"}},
        "handlers": {"log": {"class": "logging.FileHandler", "filename": str(file), "formatter": "mine"}},
        "loggers": {name: {"handlers": ["log"], "level": "INFO"} for name in ("rayllm", "uvicorn")},
    }


def renew(authority, folder):
    """A new certificate in place of the old one."""
    signed = authority.issue_cert("127.0.0.1")
    (folder / "cert").write_bytes(signed.cert_chain_pems[0].bytes())
    (folder / "key").write_bytes(signed.private_key_pem.bytes())
    return ssl.PEM_cert_to_DER_cert(signed.cert_chain_pems[0].bytes().decode())


def shown(server):
    host, port = server.url.removeprefix("https://").split(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port))))


def processes(get):
    """Those that answer a hundred requests."""
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(get, ["/v1/models"] * 100))
    assert {reply.status_code for reply in replies} == {200}
    return {reply.headers["x-process"] for reply in replies}


def streamed(server, trust):
    with httpx.stream("POST", f"{server.url}/v1/completions", json=STREAM, verify=trust, timeout=60) as reply:
        for line in reply.iter_lines():
            if line:
                yield line.removeprefix("data: ")


def wait_for(condition, timeout_s=90):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
