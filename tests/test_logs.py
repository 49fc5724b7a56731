"""Logging as a file says."""

import json
import logging

import httpx
import pytest

from rayllm.config.serve import LogSettings
from rayllm.errors import ConfigError
from rayllm.logs import configure_logging
from rayllm.serving.http_server import HttpServer, bind, url_of
from tests.options import serve_settings

NAMES = ("rayllm", "rayllm_kernels", "uvicorn", "uvicorn.error", "uvicorn.access")


@pytest.fixture(autouse=True)
def own_logging():
    """What tests change here is of the whole process."""
    loggers = [logging.getLogger(name) for name in (None, *NAMES)]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture
def written(tmp_path):
    """A file that sends loggers of these names to a log, whose lines are returned beside it."""

    def write(*names):
        config = {
            "version": 1,
            "formatters": {"mine": {"format": "[%(name)s] %(message)s"}},
            "handlers": {"log": {"class": "logging.FileHandler", "filename": f"{tmp_path}/log", "formatter": "mine"}},
            "loggers": {name: {"handlers": ["log"], "level": "INFO"} for name in names},
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path / "config.json"), lambda: (tmp_path / "log").read_text().splitlines()

    return write


async def answered(*flags):
    """Have a server with these options answer a request."""
    settings = serve_settings("--host", "127.0.0.1", "--port", "0", *flags)
    configure_logging(LogSettings(config=settings.log_config))
    logging.getLogger("rayllm.somewhere").info("ours")
    listener = bind(settings.http)
    server = HttpServer(hello, settings.http, listener)
    server.start()
    async with httpx.AsyncClient() as client:
        await client.get(f"{url_of(listener)}/asked")
    await server.stop()


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})


@pytest.mark.option("log-config-file")
async def test_a_file_decides_over_both_loggers(written, capsys):
    file, lines = written("rayllm", "uvicorn")
    await answered("--log-config-file", file)
    assert "[rayllm.somewhere] ours" in lines()
    assert any(line.startswith("[uvicorn.error] Started server process") for line in lines())
    assert any(line.startswith("[uvicorn.access]") and "GET /asked" in line for line in lines())
    assert capsys.readouterr() == ("", "")


async def test_a_level_on_the_command_line_beats_the_file(written):
    file, lines = written("rayllm", "uvicorn")
    await answered("--log-config-file", file, "--uvicorn-log-level", "warning")
    assert lines() == ["[rayllm.somewhere] ours"]


def test_a_file_that_cannot_be_applied():
    for config in ({}, {"version": 2}, {"version": 1, "handlers": {"x": {"class": "no.such"}}}):
        with pytest.raises(ConfigError, match="--log-config-file: cannot be applied: "):
            configure_logging(LogSettings(config=config))


@pytest.mark.option("log-config-file")
def test_a_file_that_cannot_be_read(tmp_path):
    for text in (None, "{", "[]"):
        file = tmp_path / "config.json"
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match="--log-config-file: "):
            serve_settings("--log-config-file", str(file))
