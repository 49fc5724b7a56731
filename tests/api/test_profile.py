"""The endpoints of profiles are there only where engines can be profiled."""

import pytest

from rayllm.messages.engine import Profile

from .conftest import ok, refused


@pytest.mark.option("profiler-config")
async def test_profiles_are_begun_and_ended(make_api):
    api = make_api(profiling=True)
    ok(await api.request("POST", "/start_profile"))
    ok(await api.request("POST", "/stop_profile"))
    assert api.service.commands == [Profile(True), Profile(False)]


@pytest.mark.option("profiler-config")
async def test_without_a_profiler_there_are_no_endpoints(api):
    for path in ("/start_profile", "/stop_profile"):
        refused(await api.request("POST", path), 404)
