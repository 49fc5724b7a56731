"""Options, model facts and machine decide every setting, or the option at fault is named."""

import dataclasses

import pytest

from rayllm.config.environment import Environment, check_names
from rayllm.config.files import Files, read_files
from rayllm.config.hardware import Hardware, probe_hardware
from rayllm.config.kv_cache import KvCacheSettings
from rayllm.config.model_facts import ModelFacts
from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.config.resolve import kv_bytes_per_token, resolve
from rayllm.config.resolve_serve import HTTP_ONLY
from rayllm.errors import ConfigError

FACTS = ModelFacts(
    path="/m",
    format="hf",
    architecture="LlamaForCausalLM",
    config={"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3},
    vocab_size=100,
    max_model_len=2048,
    dtype="bfloat16",
    generation_defaults={"temperature": 0.6, "top_p": 0.9},
)
MACHINE = Hardware(cpus=4, memory=8 * 2**30)


def resolved(*arguments, facts=FACTS, machine=MACHINE, files=None, api_key=None):
    return resolve(parse_arguments(["/m", *arguments], registry()), facts, machine, files or Files(), api_key)


def test_defaults():
    all_ = resolved()
    assert all_.engine.max_model_len == 2048
    assert all_.engine.dtype == "bfloat16"
    assert all_.engine.enable_prefix_caching
    assert all_.engine.async_scheduling
    assert all_.engine.threads == 4
    assert all_.serve.frontend.served_model_names == ("/m",)
    assert all_.serve.http.servers == 1
    assert all_.serve.frontend.generation_defaults == {"temperature": 0.6, "top_p": 0.9}


def test_engines_share_the_machine():
    all_ = resolved("--data-parallel-size", "2")
    assert (all_.engine.engines_on_host, all_.engine.threads) == (2, 2)
    assert (all_.serve.data_parallel.engines, all_.serve.http.servers) == (2, 2)
    assert resolved("-dp", "8").engine.threads == 1
    assert resolved("-dp", "2", "-asc", "3").serve.http.servers == 3


@pytest.mark.parametrize(
    ("wanted", "stored", "dtype"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", "float16", "bfloat16"),
        ("half", "bfloat16", "float16"),
        ("float", "bfloat16", "float32"),
    ],
)
def test_dtype(wanted, stored, dtype):
    assert resolved("--dtype", wanted, facts=dataclasses.replace(FACTS, dtype=stored)).engine.dtype == dtype


def test_automatic_length_is_what_fits():
    token = kv_bytes_per_token(FACTS, "bfloat16", KvCacheSettings())
    assert token == 2 * 3 * 2 * 16 * 2
    assert resolved("--max-model-len", "auto").engine.max_model_len == 2048
    assert resolved("--max-model-len", "auto", "--num-gpu-blocks-override", "10").engine.max_model_len == 160
    small = resolved("--max-model-len", "-1", "--kv-cache-memory-bytes", str(token * 100))
    assert small.engine.max_model_len == 96


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--max-model-len", "4k"], "--max-model-len"),
        (["--max-model-len", "auto", "--kv-cache-memory-bytes", "10"], "--max-model-len"),
        (["--num-gpu-blocks-override", "4"], "--num-gpu-blocks-override"),
        (["--load-format", "gguf"], "--load-format"),
        (["--logits-processors", "Nothing"], "--logits-processors"),
        (["--block-size", "17"], "--block-size"),
        (["--served-model-name", ""], "--served-model-name"),
        (["--enable-log-outputs"], "--enable-log-outputs"),
        (["--skip-tokenizer-init", "--tokenizer", "t"], "--tokenizer"),
        (["--skip-tokenizer-init", "--trust-request-chat-template"], "--trust-request-chat-template"),
        (["--override-generation-config", '{"do_sample": true}'], "--override-generation-config"),
        (["--override-generation-config", '{"temperature": "hot"}'], "--override-generation-config"),
        (["--override-generation-config", '{"temperature": -1}'], "--override-generation-config"),
        (["--override-generation-config", '{"stop": 5}'], "--override-generation-config"),
        (["--override-generation-config", '{"ignore_eos": 1}'], "--override-generation-config"),
        (["--override-generation-config", '{"max_tokens": 0}'], "--override-generation-config"),
        (["--override-generation-config", '{"stop_token_ids": [99999999]}'], "--override-generation-config"),
        (
            ["--override-generation-config", '{"max_tokens": 5, "max_new_tokens": 6}'],
            "--override-generation-config.max_new_tokens",
        ),
        (["--tokenizer", "x" * 300], "--tokenizer"),
    ],
)
def test_contradictions_are_named(arguments, option):
    with pytest.raises(ConfigError) as caught:
        resolved(*arguments)
    assert caught.value.option == option


def test_generation_defaults():
    override = ["--override-generation-config.temperature", "0"]
    assert resolved(*override).serve.frontend.generation_defaults == {"temperature": 0, "top_p": 0.9}
    renamed = resolved("--override-generation-config.max_new_tokens", "5").serve.frontend
    assert renamed.generation_defaults["max_tokens"] == renamed.max_tokens == 5
    none = ["--generation-config", "vllm"]
    assert resolved(*none, *override, files=Files(generation_config={})).serve.frontend.generation_defaults == {
        "temperature": 0
    }


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--max-log-len", "5"], "--max-log-len"),
        (["--enable-log-requests", "--no-enable-log-deltas"], "--enable-log-deltas"),
        (["--disable-log-stats", "--aggregate-engine-logging"], "--aggregate-engine-logging"),
        (["--uds", "/s", "--port", "1"], "--port"),
        (["--uds", "/s", "--host", "::1"], "--host"),
        (
            ["--disable-uvicorn-access-log", "--disable-access-log-for-endpoints", "/health"],
            "--disable-access-log-for-endpoints",
        ),
        (["--kv-cache-memory-bytes", "1g", "--gpu-memory-utilization", "0.5"], "--gpu-memory-utilization"),
        (["--num-gpu-blocks-override", "4096", "--kv-cache-memory-bytes", "1g"], "--kv-cache-memory-bytes"),
        (["--no-enable-prefix-caching", "--prefix-caching-hash-algo", "xxhash"], "--prefix-caching-hash-algo"),
    ],
)
def test_what_has_no_effect_is_said(arguments, option):
    (note,) = resolved(*arguments).notes
    assert note.startswith(f"{option} has no effect")


def test_qualified_names_have_two_spellings():
    processors = resolved("--logits-processors", "a.b.C", "a.b:D").engine.logits_processors
    assert processors == ("a.b:C", "a.b:D")


def test_keys_add_up_and_do_not_show():
    frontend = resolved("--api-key", "one", "two", api_key="three").serve.frontend
    assert frontend.api_keys == ("one", "two", "three")
    assert "three" not in repr(frontend)


def test_files_are_read(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    (tmp_path / "generation_config.json").write_text('{"top_k": 5, "max_new_tokens": 7, "do_sample": true}')
    arguments = ["/m", "--chat-template", str(tmp_path / "t.jinja"), "--generation-config", str(tmp_path)]
    files = read_files(parse_arguments(arguments, registry()), FACTS)
    assert files == Files(chat_template="{{ messages }}", generation_config={"top_k": 5, "max_tokens": 7})
    inline = read_files(parse_arguments(["/m", "--chat-template", "{{ x }}"], registry()), FACTS)
    assert inline.chat_template == "{{ x }}"


@pytest.mark.parametrize("option", ["--chat-template", "--generation-config", "--tokenizer"])
def test_missing_files_are_named(option):
    with pytest.raises(ConfigError, match=f"{option}: /no/such"):
        read_files(parse_arguments(["/m", option, "/no/such"], registry()), FACTS)


def test_environment():
    read = Environment.read({"RLLM_LOGGING_LEVEL": "DEBUG", "RLLM_REPLICA_WAIT_S": "2.5", "HOME": "/"})
    assert (read.logging_level, read.replica_wait_s, read.server_dev_mode) == ("DEBUG", 2.5, False)
    assert Environment.read({"RLLM_SERVER_DEV_MODE": "1"}).server_dev_mode
    for name, text in [("RLLM_LOGGING_LEVEL", "loud"), ("RLLM_STEP_LIMIT_S", "-1"), ("RLLM_SERVER_DEV_MODE", "yes")]:
        with pytest.raises(ConfigError, match=name):
            Environment.read({name: text})


def test_unknown_variables():
    variables = {"RLLM_LOGING_LEVEL": "x", "RLLM_FROM_ELSEWHERE": "1", "RLLM_API_KEY": "k", "HOME": "/"}
    elsewhere, misspelt = check_names(variables, fail=False)
    assert elsewhere.startswith("RLLM_FROM_ELSEWHERE: is no variable of rayllm; unset it")
    assert misspelt.startswith("RLLM_LOGING_LEVEL: is no variable of rayllm; did you mean RLLM_LOGGING_LEVEL?")
    with pytest.raises(ConfigError, match="RLLM_FROM_ELSEWHERE"):
        check_names(variables, fail=True)
    assert check_names({"RLLM_API_KEY": "k"}, fail=True) == ()


def test_the_machine_has_something():
    machine = probe_hardware()
    assert machine.cpus >= 1
    assert machine.memory > 2**20


@pytest.mark.option("grpc")
def test_grpc_takes_no_options_of_http():
    http = resolved("--grpc", "-dp", "2", "--uvicorn-log-level", "info").serve.http
    assert (http.grpc, http.servers) == (True, 2)
    assert not resolved().serve.http.grpc
    for arguments in (["--allowed-origins", '["x"]'], ["--root-path", "/x"], ["--disable-uvicorn-access-log"]):
        with pytest.raises(ConfigError, match=f"{arguments[0]}: is for HTTP, which --grpc replaces"):
            resolved("--grpc", *arguments)
    with pytest.raises(ConfigError, match="--ssl-cert-reqs: gRPC servers check all clients or none; give 0 or 2"):
        resolved("--grpc", "--ssl-certfile", "/c", "--ssl-ca-certs", "/a", "--ssl-cert-reqs", "1")
    for name in HTTP_ONLY:
        assert registry()[name].flag == f"--{name}"
    assert resolved("--grpc", "--uds", "/x").serve.http.uds == "/x"
    with pytest.raises(ConfigError, match=r"--uds.*--api-server-count 1"):
        resolved("--grpc", "--uds", "/x", "-dp", "2")
