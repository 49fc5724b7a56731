"""The command's answers that need no Ray: help, version, and errors that end it at once."""

import socket
import subprocess
import sys

import pytest

from rayllm import __version__
from rayllm.cli.main import main
from rayllm.config.registry import registry
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
    status, out, _ = run(capsys, "serve", "--help")
    assert status == 0
    for option in registry():
        assert option.flag in out or f"--[no-]{option.name}" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "--model: is missing"),
        (["serve", "/no/such/model"], "/no/such/model"),
        (["serve", "m", "--prt", "1"], "--prt: is not an option; did you mean --port"),
        (["serve", "m", "--lora-dtype", "auto"], "--lora-dtype: is not supported yet"),
        (["serve", "m", "-tp", "2"], "--tensor-parallel-size"),
        (["serve", "m", "--no-enable-chunked-prefill"], "--enable-chunked-prefill"),
    ],
)
def test_errors_end_the_command_with_one_line(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("rayllm: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_bad_variable_is_named(capsys):
    status, _, err = run(capsys, "serve", "m", RLLM_STEP_LIMIT_S="soon")
    assert status == 1
    assert "RLLM_STEP_LIMIT_S" in err


@pytest.mark.smollm2
def test_a_port_in_use_is_found_before_anything_slow(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, _, err = run(capsys, "serve", str(smollm2_gguf()), "--host", "127.0.0.1", "--port", port)
    assert status == 1
    assert f"--port: cannot listen on 127.0.0.1:{port}" in err


def test_checking_options_loads_neither_ray_nor_torch():
    script = (
        "import sys; from rayllm.cli.main import main; main(['serve', '/no/such'], {}); "
        "print([name for name in ('ray', 'torch', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
