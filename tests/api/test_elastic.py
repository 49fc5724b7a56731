"""Endpoints that change the number of engines."""

import pytest

from rayllm.errors import Overloaded

from .conftest import ok, refused

PATHS = ("/scale_elastic_ep", "/is_scaling_elastic_ep")


@pytest.fixture
def elastic(make_api):
    return make_api(elastic=True)


async def scale(api, **body):
    return await api.request("POST", PATHS[0], json=body)


async def test_only_where_asked_for_and_with_a_key(api, make_api):
    for path in PATHS:
        refused(await api.request("POST", path), 404)
        refused(await make_api(elastic=True, api_keys=("k",)).request("POST", path), 401)


async def test_sizes(elastic):
    body = ok(await scale(elastic, new_data_parallel_size=3))
    assert body == {"message": "Scaled to 3 data parallel engines"}
    ok(await scale(elastic, new_data_parallel_size=1, drain_timeout=5))
    assert elastic.service.scales == [(3, 120), (1, 5)]
    assert ok(await elastic.request("POST", PATHS[1])) == {"is_scaling_elastic_ep": False}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 0}, "new_data_parallel_size"),
        ({"new_data_parallel_size": "2"}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 10**6}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 2, "drain_timeout": 0}, "drain_timeout"),
        ({"new_data_parallel_size": 2, "drain_timeout": 1e300}, "drain_timeout"),
        ({"new_data_parallel_size": 2, "force": True}, "force"),
    ],
)
async def test_bad_sizes(elastic, body, field):
    assert refused(await scale(elastic, **body))["param"] == field
    assert elastic.service.scales == []


async def test_what_cannot_be_done_now(elastic):
    elastic.service.scale_failure = Overloaded("the number of engines is changing already")
    assert "changing already" in refused(await scale(elastic, new_data_parallel_size=3), 503)["message"]
    assert ok(await elastic.request("POST", PATHS[1])) == {"is_scaling_elastic_ep": True}
    elastic.service.scale_failure = TimeoutError()
    message = refused(await scale(elastic, new_data_parallel_size=3, drain_timeout=2), 408)["message"]
    assert message == "there are not 3 engines after 2 s yet; the change goes on"
