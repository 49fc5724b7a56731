"""Models by name: what is asked of the hub, where it lies then, and what is said when it cannot be had."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from rayllm.config.hub import is_hub_name

pytestmark = pytest.mark.slow

NAME = "someone/tiny"
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 80,
    "num_attention_heads": 6, "num_hidden_layers": 2, "vocab_size": 100, "torch_dtype": "bfloat16",
}  # fmt: skip


def files(layers: int) -> dict[str, bytes]:
    return {
        "config.json": json.dumps({**CONFIG, "num_hidden_layers": layers}).encode(),
        "tokenizer.json": f'{{"version": "{layers}"}}'.encode(),
        "model.safetensors": b"weights" * layers,
        "pytorch_model.bin": b"pickles",
        "consolidated.safetensors": b"copies",
        "original/params.json": b"{}",
        "notes.md": b"words",
    }


def small_gguf(path: Path) -> bytes:
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in (("embedding_length", 32), ("block_count", 7), ("feed_forward_length", 32)):
        writer.add_uint32(f"llama.{key}", value)
    for key in ("context_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 2)
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@dataclass
class Hub:
    """A hub on this machine, with one model in two revisions."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(
        default_factory=lambda: {commit: files(number + 2) for number, commit in enumerate(COMMITS.values())}
    )
    """By commit and name."""
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, authorization) of every request."""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        trees = self.files
        match path.partition("?")[0].strip("/").split("/"):
            case ["api", "models", *name, "revision", revision] if "/".join(name) == NAME:
                commit = COMMITS.get(revision, revision)
                if commit not in trees:
                    return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
                siblings = [{"rfilename": file} for file in trees[commit]]
                return 200, {}, json.dumps({"id": NAME, "sha": commit, "siblings": siblings}).encode()
            case ["api", "models", *name, "tree", commit] if "/".join(name) == NAME and commit in trees:
                tree = [
                    {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for file, data in trees[commit].items()
                ]
                return 200, {}, json.dumps(tree).encode()
            case [*_, "broken.safetensors"]:
                return 403, {}, b"no"
            case [owner, name, "resolve", commit, *parts] if f"{owner}/{name}" == NAME and "/".join(parts) in trees.get(
                commit, {}
            ):
                data = trees[commit]["/".join(parts)]
                return 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}, data
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


@pytest.fixture
def hub() -> Iterator[Hub]:
    one = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            one.seen.append((self.path, self.headers.get("authorization")))
            status, headers, body = one.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    one.url = f"http://127.0.0.1:{server.server_port}"
    yield one
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def start(hub: Hub, tmp_path: Path) -> Any:
    """`rayllm serve` up to its resolved settings, in a process whose hub is ours; what it says, or its error."""

    def run(*arguments: str, **variables: str) -> dict[str, Any]:
        code = (
            "import json, sys\n"
            "from rayllm.config.load import load\n"
            "from rayllm.config.parser import parse_arguments\n"
            "from rayllm.config.registry import registry\n"
            "from rayllm.errors import RayLLMError\n"
            "try:\n"
            "    r = load(parse_arguments(sys.argv[1:], registry()))\n"
            "    out = {'path': r.engine.model.path, 'layers': r.engine.model.config['num_hidden_layers'],\n"
            "           'names': r.serve.frontend.served_model_names, 'tokenizer': r.serve.frontend.tokenizer_path,\n"
            "           'code': r.engine.code}\n"
            "except RayLLMError as error:\n"
            "    out = {'error': str(error)}\n"
            "print(json.dumps(out | {'torch': 'torch' in sys.modules}))\n"
        )
        own = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""}
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, **own, **variables},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert out.pop("torch") is False
        return out

    return run


def asked_for(hub: Hub) -> set[tuple[str, str]]:
    """(commit, file) of every file that was fetched."""
    paths = [path.partition("?")[0].strip("/").split("/") for path, _ in hub.seen]
    return {(path[3], "/".join(path[4:])) for path in paths if path[2:3] == ["resolve"]}


def tokens(hub: Hub) -> set[str | None]:
    """What the requests for the model were authorized by."""
    return {token for path, token in hub.seen if NAME in path}


@pytest.mark.option("model", "download-dir", "hf-token")
def test_a_model_is_fetched_once(hub: Hub, start: Any, tmp_path: Path) -> None:
    there = ("--download-dir", str(tmp_path / "there"))
    first = start(NAME, *there, "--hf-token", "secret")
    assert first["names"] == [NAME]
    assert first["layers"] == 2
    assert Path(first["path"]).is_relative_to(tmp_path / "there")
    assert not list((tmp_path / "home").rglob("config.json"))
    wanted = ("config.json", "tokenizer.json", "model.safetensors")
    assert asked_for(hub) == {(COMMITS["main"], name) for name in wanted}
    assert tokens(hub) == {"Bearer secret"}
    hub.seen.clear()
    assert start(NAME, *there, HF_HUB_OFFLINE="1") == first
    assert start(NAME, *there) == first
    assert asked_for(hub) == set()


@pytest.mark.option("revision", "tokenizer-revision", "load-format")
def test_revisions(hub: Hub, start: Any) -> None:
    other = start(NAME, "--revision", "v2", "--tokenizer-revision", "main", "--load-format", "pt")
    assert other["layers"] == 3
    assert '"2"' in (Path(other["tokenizer"]) / "tokenizer.json").read_text()
    assert (COMMITS["v2"], "pytorch_model.bin") in asked_for(hub)
    assert not {name for _, name in asked_for(hub)} & {"model.safetensors", "consolidated.safetensors"}
    assert "--revision: someone/tiny has no revision 'v3'" in start(NAME, "--revision", "v3")["error"]
    unknown = start(NAME, "--tokenizer-revision", "v3")["error"]
    assert "--tokenizer-revision: someone/tiny has no revision 'v3'" in unknown


@pytest.mark.option("code-revision", "trust-remote-code")
def test_code_of_another_revision(hub: Hub, start: Any) -> None:
    """Code comes of its own revision, from the model's repository or the one that the config names."""
    for commit, layers in ((COMMITS["main"], 2), (COMMITS["v2"], 3)):
        config = json.loads(hub.files[commit]["config.json"])
        own = {"architectures": ["Own"], "model_type": "own", "num_hidden_layers": layers}
        # In one revision without the repository's name, as its author wrote it, in the other with it.
        place = "" if layers == 2 else f"{NAME}--"
        named = {"AutoConfig": f"{place}own.OwnConfig", "AutoModelForCausalLM": f"{place}own.Own"}
        hub.files[commit]["config.json"] = json.dumps({**config, **own, "auto_map": named}).encode()
        hub.files[commit]["own.py"] = b"of " + commit.encode()
    told = start(NAME, "--trust-remote-code", "--code-revision", "v2", "--revision", "main")
    assert told["layers"] == 2
    assert Path(told["code"], "own.py").read_bytes() == b"of " + COMMITS["v2"].encode()
    assert (COMMITS["v2"], "own.py") in asked_for(hub)
    assert (COMMITS["main"], "model.safetensors") in asked_for(hub)
    assert not {(COMMITS["v2"], "model.safetensors"), (COMMITS["main"], "own.py")} & asked_for(hub)
    elsewhere = start(NAME, "--trust-remote-code", "--revision", "v2", "--code-revision", "main")
    assert Path(elsewhere["code"], "own.py").read_bytes() == b"of " + COMMITS["main"].encode()
    assert (
        "--code-revision: someone/tiny has no revision 'v3'"
        in start(NAME, "--trust-remote-code", "--code-revision", "v3")["error"]
    )
    hub.seen.clear()
    assert "give --trust-remote-code if you trust it" in start(NAME, "--code-revision", "v2")["error"]
    assert not {name for _, name in asked_for(hub)} & {"own.py"}


@pytest.mark.option("hf-token")
def test_the_stored_token(hub: Hub, start: Any, tmp_path: Path) -> None:
    assert "--hf-token: no token is stored" in start(NAME, "--hf-token")["error"]
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home/token").write_text("stored")
    hub.seen.clear()
    assert start(NAME, "--hf-token")["layers"] == 2
    assert tokens(hub) == {"Bearer stored"}


@pytest.mark.option("model")
def test_a_gguf_file(hub: Hub, start: Any, tmp_path: Path) -> None:
    hub.files = {COMMITS["main"]: {"config.json": b"{}", "m-Q8_0.gguf": small_gguf(tmp_path / "m.gguf")}}
    there = start(NAME)
    assert Path(there["path"]).name == "m-Q8_0.gguf"
    assert there["layers"] == 7
    hub.files[COMMITS["v2"]] = {"one.gguf": b"", "two.gguf": b""}
    assert "holds 2 GGUF files; fetch one" in start(NAME, "--revision", "v2")["error"]


@pytest.mark.option("model")
def test_a_file_that_the_hub_will_not_give(hub: Hub, start: Any) -> None:
    hub.files[COMMITS["main"]]["broken.safetensors"] = b"lost"
    error = start(NAME)["error"]
    assert error.startswith("--model: someone/tiny")
    assert "403" in error


@pytest.mark.option("tokenizer", "hf-config-path", "ignore-patterns")
def test_other_things_by_name(hub: Hub, start: Any, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    told = start(str(tmp_path / "m"), "--hf-config-path", NAME, "--tokenizer", NAME, "--load-format", "dummy")
    assert told["layers"] == 2
    assert (Path(told["tokenizer"]) / "tokenizer.json").is_file()
    assert "holds no weights" in start(NAME, "--ignore-patterns", "*.safetensors", "*.bin")["error"]


@pytest.mark.option("model")
def test_what_cannot_be_had(start: Any, tmp_path: Path) -> None:
    assert "someone/else is neither a file or folder here nor on the hub; " in start("someone/else")["error"]
    offline = start(NAME, HF_HUB_OFFLINE="1")["error"]
    assert "neither a file or folder here nor in the cache" in offline
    assert "unset HF_HUB_OFFLINE" in offline
    assert "nor in the cache, and the hub does not give it (" in start(NAME, HF_ENDPOINT="http://127.0.0.1:9")["error"]
    assert "--revision: " in start(str(tmp_path), "--revision", "v2")["error"]
    assert "--tokenizer-revision: " in start(str(tmp_path), "--tokenizer-revision", "v2")["error"]


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/model").mkdir()
    assert is_hub_name("Qwen/Qwen3-0.6B")
    for path in ("here/model", "/no/such", "./a/b", "../a", "m", "a/b/c", "model.gguf"):
        assert not is_hub_name(path)
