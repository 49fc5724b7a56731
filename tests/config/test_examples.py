"""The common commands of users: each parses; what can be done here resolves, the rest is refused with its reason."""

import json
from pathlib import Path

import pytest
import trustme

from rayllm.config.load import load
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import Values, registry
from rayllm.config.resolve import Resolved
from rayllm.errors import ConfigError
from tests.config.test_plan import LLAMA

BIG = (
    "--host 0.0.0.0 --port 8000 --tensor-parallel-size 4 --gpu-memory-utilization 0.90 --max-model-len 32768 "
    "--max-num-seqs 256 --dtype auto --enforce-eager --enable-prefix-caching --enable-chunked-prefill "
    "--max-num-batched-tokens 32768 --api-key sk-your-secret-key-here --served-model-name qwen2.5-72b "
    "--trust-remote-code --disable-log-stats --uvicorn-log-level warning --disable-uvicorn-access-log"
)
VISION = (
    "--host 0.0.0.0 --port 8000 --tensor-parallel-size 4 --gpu-memory-utilization 0.90 --max-model-len 32768 "
    """--limit-mm-per-prompt {"image":10,"video":2}"""
)
RUN = (
    BIG,
    "--api-key sk-your-strong-random-key-here",
    '--allowed-origins ["https://your-frontend-domain.com"]',
    "--enable-chunked-prefill --max-num-batched-tokens 32768",
    "--enable-prefix-caching",
    "--enforce-eager",
    "--async-scheduling",
    "--gpu-memory-utilization 0.90",
    "--cpu-offload-gb 20",
    "--disable-log-stats --uvicorn-log-level warning --disable-uvicorn-access-log",
    "--kv-cache-metrics --kv-cache-metrics-sample 0.01",
    "--ssl-keyfile KEY --ssl-certfile CERTIFICATE",
)
REFUSED = {
    VISION: "--limit-mm-per-prompt: is not supported yet; ",
    "--kv-offloading-size 10 --kv-offloading-backend native": "--kv-offloading-size: is not supported yet; ",
}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Files of a key and its certificate."""
    folder, made = tmp_path_factory.mktemp("tls"), trustme.CA().issue_cert("localhost")
    made.private_key_pem.write_to_path(folder / "key.pem")
    made.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    return folder / "key.pem", folder / "certificate.pem"


def parsed(folder: Path, command: str) -> Values:
    (folder / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 32768}))
    return parse_arguments([str(folder), *command.split()], registry())


def resolved(folder: Path, command: str) -> Resolved:
    return load(parsed(folder, command))


@pytest.mark.parametrize("command", RUN)
def test_resolves(tmp_path: Path, command: str, certificate: tuple[Path, Path]) -> None:
    key, cert = certificate
    result = resolved(tmp_path, command.replace("KEY", str(key)).replace("CERTIFICATE", str(cert)))
    assert [note for note in result.notes if "--cpu-offload-gb" not in note] == []


@pytest.mark.parametrize(("command", "message"), REFUSED.items())
def test_is_refused(tmp_path: Path, command: str, message: str) -> None:
    parsed(tmp_path, command)
    with pytest.raises(ConfigError, match=message):
        resolved(tmp_path, command)


def test_offloading_to_where_the_weights_are_is_said_to_do_nothing(tmp_path: Path) -> None:
    (note,) = resolved(tmp_path, "--cpu-offload-gb 20").notes
    assert note == "--cpu-offload-gb has no effect: weights are in CPU memory already"
