"""The lines of engine statistics in the log."""

import asyncio
import logging
import re

import pytest

from rayllm.config.parser import parse_arguments
from rayllm.config.registry import registry
from rayllm.messages.ingress import EngineStats, Load
from rayllm.serving import service as service_module
from rayllm.serving.service import ServiceImpl
from rayllm.serving.statistics import combined


@pytest.fixture
async def lines(service, helpers, caplog, monkeypatch):
    """The first lines that a service of two engines under load logs, given options."""
    caplog.set_level(logging.INFO, "rayllm.serving.statistics")
    monkeypatch.setattr(service_module, "STATS_EVERY_S", 0.05)
    monkeypatch.setattr(service_module, "machine_address", lambda: "here")
    monkeypatch.setattr(service_module, "ServeDirectory", lambda engines, host: service.directory)
    for rank in range(2):
        service.add_engine(interval_s=0.01, rank=rank)

    async def logged(*flags, count=6):
        values = parse_arguments(["m", *flags], registry())
        one = ServiceImpl(None, "demo", "test", helpers.limits)
        one.attach(None, log_stats=not values["disable-log-stats"], aggregate_stats=values["aggregate-engine-logging"])
        await helpers.until(lambda: len(one._fleet.sessions()) == 2)
        streams = await one.submit([helpers.add([5, i], max_tokens=10_000) for i in range(4)])
        if count:
            await helpers.until(lambda: len(caplog.messages) >= count)
        else:
            await asyncio.sleep(0.3)
        for stream in streams:
            stream.abort()
        await one.close()
        return caplog.messages

    return logged


@pytest.mark.option("disable-log-stats")
async def test_a_line_for_each_engine_and_interval(lines):
    found = [re.match(r"engine (\d) \((e\d)\): ", line) for line in await lines()]
    assert {match[1] for match in found} == {"0", "1"}
    assert {match[2] for match in found} == {"e1", "e2"}
    assert all(one[1] != two[1] for one, two in zip(found[::2], found[1::2], strict=False))


@pytest.mark.option("disable-log-stats")
async def test_none_at_all(lines):
    assert await lines("--disable-log-stats", count=0) == []


@pytest.mark.option("aggregate-engine-logging")
async def test_one_line_for_all_engines(lines):
    found = await lines("--aggregate-engine-logging")
    assert all(line.startswith("2 engines: ") for line in found)
    assert "4 running" in found[-1]


def test_sums():
    small = EngineStats(load=Load(1, 2, 0, 0.5), blocks_total=10, prompt_tokens=3, prefix_queries=4, prefix_hits=1)
    large = EngineStats(load=Load(2, 0, 0, 0.1), blocks_total=30, generation_tokens=5, prefix_queries=4, prefix_hits=3)
    both = combined([small, large])
    assert (both.load.running, both.load.waiting, both.prompt_tokens, both.generation_tokens) == (3, 2, 3, 5)
    assert (both.prefix_queries, both.prefix_hits) == (8, 4)
    assert both.load.kv_usage == pytest.approx(0.2)
    assert combined([]) == EngineStats()
