"""The OpenAPI document is true: what it allows or forbids is sent, and every answer is one that it describes."""

import asyncio
import copy
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rayllm.api.describe import openapi_document

from .conftest import MODEL, Harness
from .test_odd_bodies import BODIES, SAY

pytestmark = pytest.mark.slow

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
"""Not that all valid bodies are taken: the document cannot say which messages a template takes, for example."""
VALID = {
    **BODIES,
    "/v1/messages/render": BODIES["/v1/messages"],
    "/v1/responses/render": BODIES["/v1/responses"],
    "/v1/messages/count_tokens": {"messages": SAY},
    "/tokenize": {"messages": SAY, "return_token_strs": True},
}
"""Bodies that are answered, for generated fields to be put into."""
OPERATIONS = [(method, path) for path, methods in openapi_document()["paths"].items() for method in methods]
CALLS = 2000
"""Of the whole run, over all operations."""


class Client:
    """Sends cases to an app in one event loop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._harness = Harness(max_model_len=300)
        self._harness.service.answer = 0
        self.schema = schemathesis.openapi.from_dict(openapi_document())
        self.statuses: list[int] = []

    def send(self, case: schemathesis.Case) -> httpx.Response:
        given = case.as_transport_kwargs(base_url="http://test")
        path = given["url"].removeprefix("http://test")
        # Named as requests has them; httpx has another name for bytes.
        known = {name: given[name] for name in ("params", "headers", "json", "cookies") if given.get(name) is not None}
        if given.get("data") is not None:
            known["content"] = given["data"]
        reply = self._runner.run(self._harness.request(given["method"], path, **known))
        self.statuses.append(reply.status_code)
        return reply

    def stored(self) -> str:
        """The id of a response that can be fetched."""
        body = {"input": "hi", "background": True, "stream": True, "metadata": {"a": "b"}}
        reply = self._runner.run(self._harness.post("/v1/responses", **body))
        assert reply.status_code == 200
        return reply.text.partition('"id":"')[2].partition('"')[0]

    def close(self) -> None:
        self._runner.close()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    made = Client()
    yield made
    made.close()


def cases(operation: schemathesis.APIOperation, takes_body: bool, path: str) -> st.SearchStrategy[schemathesis.Case]:
    """Cases of all kinds: as the document has it, against it, and valid bodies with some fields of the former."""
    valid = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    kinds = [valid, operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)]
    if takes_body:
        kinds += [st.tuples(valid, st.randoms(use_true_random=False)).map(lambda two: _mixed(*two, path))] * 2
    return st.one_of(kinds)


def _mixed(case, random, path):
    body = copy.deepcopy(VALID[path])
    for name in random.sample(sorted(case.body), min(len(case.body), random.choice((0, 1, 1, 2, 3)))):
        if name not in body:
            body[name] = case.body[name]
    case.body = body | {"model": MODEL}
    return case


def check(client: Client, method: str, path: str, calls: int) -> None:
    operation = client.schema[path][method]
    stored = client.stored() if "/responses/{id}" in path else MODEL
    takes_body = method == "post" and path in VALID
    client.statuses.clear()
    if takes_body:
        case = operation.Case(body=VALID[path] | {"model": MODEL}, media_type="application/json")
        case.validate_response(client.send(case), checks=CHECKS[:-1])

    @settings(
        max_examples=calls, phases=[Phase.generate], deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases(operation, takes_body, path), known=st.booleans())
    def call(case: schemathesis.Case, known: bool) -> None:
        if known and "id" in case.path_parameters:
            case.path_parameters["id"] = stored
        case.validate_response(client.send(case), checks=CHECKS)

    call()
    if "id" not in path:
        assert 200 in client.statuses


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_those_of_the_document(client, method, path):
    check(client, method, path, 12)


@pytest.mark.long
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_many_answers_are_those_of_the_document(client, method, path):
    bodies = [path for method, path in OPERATIONS if method == "post" and path in VALID]
    check(client, method, path, CALLS // len(bodies) if method == "post" and path in VALID else 40)
