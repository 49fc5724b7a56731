"""The command's answers that need no Ray: help, version, and errors that end it at once."""

import json
import socket
import subprocess
import sys

import pytest

from rayllm import __version__
from rayllm.cli.main import main
from rayllm.config.registry import registry
from tests.config.test_plan import LLAMA
from tests.models import smollm2_gguf


def run(capsys, *arguments, **variables):
    status = main(arguments, variables)
    return (status, *capsys.readouterr())


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")


def test_usage(capsys):
    assert run(capsys, "--help")[0] == 0
    status, out, err = run(capsys, "dance")
    assert (status, out) == (2, "")
    assert "usage" in err


def test_help_tells_of_every_option(capsys):
    status, out, _ = run(capsys, "serve", "--help=all")
    assert status == 0
    for option in registry():
        assert option.flag in out or f"--[no-]{option.name}" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "Qwen/Qwen3-0.6B"),
        (["serve", "--help=nothing-of-this"], "--help=nothing-of-this: finds nothing"),
        (["completion", "tcsh"], "bash, zsh, fish"),
        (["serve", "/no/such/model"], "/no/such/model"),
        (["serve", "m", "--prt", "1"], "--prt: is not an option; did you mean --port"),
        (["serve", "m", "--lora-dtype", "float16"], "--lora-dtype: is not supported yet"),
        (["serve", "m", "-dcp", "2"], "--decode-context-parallel-size: is not supported yet"),
        (["serve", "m", "--block-size", "0"], "--block-size: 0 is below 1"),
    ],
)
def test_errors_end_the_command_with_one_line(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("rayllm: ")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "option", "value", "cure"),
    [
        (["--max-model-len", "1.5K"], "--max-model-len", "1.5K", "k, m and g"),
        (["--prot", "80"], "--prot", "", "did you mean --port?"),
        (["--port", "70000"], "--port", "70000", "65535"),
        (["--dtype", "fp16"], "--dtype", "'fp16'", "float16"),
        (["--block-size", "12"], "--block-size", "12", "choose 16 or 32"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization", "1.5", "1.0, the largest value"),
        (["--hf-overrides", "{num_layers: 1}"], "--hf-overrides", "{num_layers: 1}", "quote it for the shell"),
        (["--load-format", "safetensor"], "--load-format", "'safetensor'", "safetensors"),
        (["--enable-lora"], "--enable-lora", "", "merge the adapter into the weights"),
        (["--enable-sleep-mode"], "--enable-sleep-mode", "", "leave it out"),
        (["--ssl-certfile", "/no/such.pem"], "--ssl-certfile", "/no/such.pem", "No such file"),
        (["-cc.mod=3"], "--compilation-config.mod", "", "did you mean mode?"),
    ],
)
def test_wrong_command_lines_name_the_option_the_value_and_the_cure(capsys, tmp_path, arguments, option, value, cure):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    status, out, err = run(capsys, "serve", str(tmp_path), *arguments)
    assert (status, out) == (1, "")
    error = err.splitlines()[-1]
    assert error.startswith(f"rayllm: {option}")
    assert value in error
    assert cure in error


def test_a_bad_variable_is_named(capsys):
    status, _, err = run(capsys, "serve", "m", RLLM_STEP_LIMIT_S="soon")
    assert status == 1
    assert "RLLM_STEP_LIMIT_S" in err


@pytest.mark.option("fail-on-environ-validation")
def test_an_unknown_variable_is_a_warning_unless_it_is_to_end_the_start(capsys):
    arguments, variables = ("serve", "/no/such/model"), {"RLLM_LOGING_LEVEL": "DEBUG"}
    message = "RLLM_LOGING_LEVEL: is no variable of rayllm; did you mean RLLM_LOGGING_LEVEL?"
    status, _, err = run(capsys, *arguments, "--fail-on-environ-validation", **variables)
    assert (status, err) == (1, f"rayllm: {message}\n")
    assert "/no/such/model" in run(capsys, *arguments, **variables)[2]


@pytest.mark.smollm2
def test_a_port_in_use_is_found_before_anything_slow(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, _, err = run(capsys, "serve", str(smollm2_gguf()), "--host", "127.0.0.1", "--port", port)
    assert status == 1
    assert f"--port: cannot listen on 127.0.0.1:{port}" in err


@pytest.mark.smollm2
@pytest.mark.option("grpc")
def test_without_the_packages_of_grpc_their_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc_health", None)
    status, _, err = run(capsys, "serve", str(smollm2_gguf()), "--grpc", "--host", "127.0.0.1", "--port", "0")
    assert status == 1
    assert "--grpc: the package grpc_health is not installed; pip install 'rayllm[grpc]'" in err


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat-template", "{% if %}"], "the chat template is malformed"),
        (["--default-chat-template-kwargs.thinking", "true"], "no variable 'thinking'"),
    ],
)
def test_a_bad_chat_template_too(capsys, arguments, message):
    status, out, err = run(capsys, "serve", str(smollm2_gguf()), "--port", "0", *arguments)
    assert (status, out) == (1, "")
    assert message in err.splitlines()[-1]


def test_checking_options_loads_neither_ray_nor_torch():
    script = (
        "import sys; from rayllm.cli.main import main; main(['serve', '/no/such'], {}); "
        "print([name for name in ('ray', 'torch', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_help_is_short_and_leads_on(capsys):
    status, out, _ = run(capsys, "serve", "--help")
    assert status == 0
    assert len(out.splitlines()) < 50
    for topic in ("all", "SECTION", "OPTION"):
        assert f"--help={topic}" in out


@pytest.mark.parametrize(
    ("topic", "there", "not_there"),
    [
        ("max-model-len", "--max-model-len HUMAN_INT", "--port"),
        ("--max_model_len", "--max-model-len HUMAN_INT", "--port"),
        ("-tp", "--tensor-parallel-size", "--port"),
        ("cache", "--block-size", "--port"),
        ("prometheus", "", ""),
        ("certificate", "--ssl-certfile", "--block-size"),
        ("compilation-config", "cudagraph_mode", "--port"),
    ],
)
def test_help_of_a_topic(capsys, topic, there, not_there):
    status, out, err = run(capsys, "serve", f"--help={topic}")
    if not there:
        assert (status, out) == (1, "")
        assert "finds nothing" in err
        return
    assert status == 0
    assert there in out
    assert not_there not in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_options_for_machines(capsys):
    status, out, _ = run(capsys, "options", "--json")
    options = json.loads(out)
    assert status == 0
    assert len(options) == 227
    assert {option["state"] for option in options} == {"effective", "cuda", "planned"}
    assert options[1] | {"help": ""} == {
        "name": "--api-server-count", "aliases": ["-asc"], "section": "general", "type": "int", "default": None,
        "choices": None, "unit": None, "state": "effective", "help": "",
    }  # fmt: skip
    assert len(json.loads(run(capsys, "options", "--json", "--legacy")[1])) == 33
    assert "| `--port` | int | `8000` | effective |" in run(capsys, "options")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(capsys, tmp_path, shell):
    """In bash itself; zsh's script is the same behind its bridge."""
    script = run(capsys, "completion", shell)[1].removeprefix("autoload -U +X bashcompinit && bashcompinit\n")

    def completed(*words):
        line = " ".join(f"'{word}'" for word in words)
        code = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _rayllm; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
        )
        return done.stdout.split()

    (tmp_path / "model.gguf").touch()
    assert completed("rayllm", "s") == ["serve"]
    assert completed("rayllm", "serve", "m") == ["model.gguf"]
    assert completed("rayllm", "serve", "--max-model") == ["--max-model-len"]
    assert completed("rayllm", "serve", "--dtype", "bf") == ["bfloat16"]


def test_completion_in_fish(capsys):
    out = run(capsys, "completion", "fish")[1]
    assert "complete -c rayllm -l dtype" in out


@pytest.mark.smollm2
@pytest.mark.parametrize(
    "flags",
    [
        ["--ssl-certfile", "/no/such.crt", "--ssl-keyfile", "/no/such.key"],
        ["--middleware", "no.such.thing"],
        ["--log-config-file", "/no/such.json"],
    ],
)
def test_what_the_http_servers_cannot_use_ends_the_command(capsys, flags):
    status, _, err = run(capsys, "serve", str(smollm2_gguf()), *flags)
    assert status == 1
    assert err.splitlines()[-1].startswith(f"rayllm: {flags[0]}: ")
