"""`rayllm serve --grpc` as a user meets it: the demo model behind two server processes, and a client."""

import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from rayllm.grpc import rayllm_pb2 as pb
from rayllm.grpc.rayllm_pb2_grpc import LLMStub
from tests.launch import served
from tests.models import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.smollm2]

KEY = (("authorization", "Bearer k"),)
FRANCE = pb.ChatRequest(
    messages=[pb.Message(role="user", content="What is the capital of France?")],
    parameters=pb.Parameters(temperature=0, max_tokens=24),
)
STORY = pb.CompletionRequest(text="Once upon a time", parameters=pb.Parameters(max_tokens=100, ignore_eos=True))
FLAGS = ("--grpc", "--api-server-count", "2", "--api-key", "k", "--shutdown-timeout", "30", "--max-model-len", "512")


def answers_grpc(url):
    with grpc.insecure_channel(url.removeprefix("http://")) as channel:
        try:
            status = HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="rayllm.v1.LLM"), timeout=5).status
        except grpc.RpcError:
            return False
        return status == health_pb2.HealthCheckResponse.SERVING


def listeners(port):
    """How many sockets listen at a port. gRPC's are of IPv6, and take IPv4 as well."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


@pytest.mark.option("grpc", "api-server-count", "api-key", "shutdown-timeout")
def test_grpc_in_place_of_http(tmp_path):
    with served(smollm2_gguf(), *FLAGS, folder=tmp_path, healthy=answers_grpc) as server:
        address = server.url.removeprefix("http://")
        channel = grpc.insecure_channel(address)
        llm = LLMStub(channel)
        whole = llm.Chat(FRANCE, metadata=KEY)
        assert "Paris" in whole.choices[0].text
        *pieces, last = llm.StreamChat(FRANCE, metadata=KEY)
        assert "".join(choice.text for piece in pieces for choice in piece.choices) == whole.choices[0].text
        assert last.usage == whole.usage
        with pytest.raises(grpc.RpcError) as caught:
            llm.Chat(FRANCE)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/v1/models", timeout=10)
        end = time.monotonic() + 60
        while listeners(int(address.rpartition(":")[2])) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert f"' {address} rayllm.v1.LLM/Chat" in server.log.read_text()
        stream = llm.StreamComplete(STORY, metadata=KEY)
        seen = [next(stream)]
        reader = threading.Thread(target=lambda: seen.extend(stream), daemon=True)
        reader.start()
    reader.join(30)
    channel.close()
    assert seen[-1].usage.completion_tokens == 100
