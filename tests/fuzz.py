"""Sends mutated requests to a running server: `python -m tests.fuzz URL [--requests N] [--seed S]`.

The same seed sends the same requests. Some clients leave before they have their answer. Told as faults are a status of
500 and more, an answer that does not parse or does not come, and an error of the server's own in a stream.
"""

import argparse
import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from tests.api.test_odd_bodies import BODIES, SAY, mutated

ANSWER_S = 120.0
MOST_TOKENS = 24
VALID: dict[str, dict[str, Any]] = {
    **{path: body for path, body in BODIES.items() if path != "/collective_rpc"},
    "/v1/messages/render": BODIES["/v1/messages"],
    "/v1/responses/render": BODIES["/v1/responses"],
    "/v1/completions": {**BODIES["/v1/completions"], "max_tokens": 4},
}
BEAMS = {"prompt": "a", "max_tokens": 4, "use_beam_search": True, "n": 3, "length_penalty": 0.5}
FORMS = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
    {"structured_outputs": {"regex": "[a-z]{3}"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "required"},
]
GETS = (
    "/v1/models/{}",
    "/v1/responses/{}",
    "/v1/responses/{}/input_items?limit={}",
    "/v1/responses/{}?stream={}",
    "/{}",
)
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True)
class Request:
    """One request, and after how many seconds its client leaves."""

    method: str
    path: str
    content: bytes | None = None
    leave_after: float | None = None


@dataclass
class Outcome:
    """What a run of requests came to."""

    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0
    faults: list[str] = field(default_factory=list)


def make_requests(seed: int, count: int) -> list[Request]:
    """The requests of a seed."""
    rng = random.Random(seed)
    return [_request(rng) for _ in range(count)]


def _request(rng: random.Random) -> Request:
    if rng.random() < 0.05:
        odd = [rng.choice(("x", "%00", "%ff", "..%2f", "-1", "9" * 40, "%F0%9F%AB%A0", "resp_x")) for _ in range(2)]
        return Request(rng.choice(("GET", "GET", "DELETE", "PUT")), rng.choice(GETS).format(*odd))
    path = rng.choice(sorted(VALID))
    valid = VALID[path]
    if path == "/v1/completions" and rng.random() < 0.3:
        valid = BEAMS
    if path == "/v1/chat/completions" and rng.random() < 0.4:
        valid = {"messages": SAY, "max_tokens": 4, **rng.choice(FORMS)}
    # Some stay valid, so that the others have company in the engine.
    body = valid if rng.random() < 0.25 else _bounded(mutated(valid, rng), valid)
    content = _written(body, rng)
    return Request("POST", path, content, rng.choice((0.001, 0.02, 0.2)) if rng.random() < 0.1 else None)


def _bounded(body: Any, valid: dict[str, Any]) -> Any:
    """The body with a bounded output, since thousands of them are to end."""
    for given, known in ((body, valid), (body.get("sampling_params"), valid.get("sampling_params") or {})):
        for name in _LENGTHS:
            if name in known and isinstance(given, dict):
                length = given.get(name)
                if length is None or (type(length) is int and MOST_TOKENS < length < 2**40):
                    given[name] = 3
    return body


def _written(body: Any, rng: random.Random) -> bytes:
    """A body as bytes, of which some are no JSON, and some say a key twice."""
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    raw = text.encode("utf-8", "surrogatepass")
    match rng.randrange(24):
        case 0:
            return raw[: rng.randrange(len(raw) + 1)]
        case 1:
            at = rng.randrange(len(raw) + 1)
            return raw[:at] + bytes(rng.randrange(256) for _ in range(3)) + raw[at:]
        case 2:
            return raw[:-1] + b"," + raw[1:]  # each key twice
        case 3:
            return (
                raw[:-1]
                + b',"user":'
                + rng.choice((b"[" * 20000, b"1" * 5000, b"NaN", b"-0e9999", b'"\\ud800"'))
                + b"}"
            )
        case 4:
            return raw[:-1] + b',"user":"' + "é龜".encode() * 100_000 + b'"}'
    return raw


async def fuzz(url: str, requests: list[Request], at_once: int = 8) -> Outcome:
    """Send requests, some at once."""
    out, gate = Outcome(), asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:

        async def one(number: int, request: Request) -> None:
            async with gate:
                fault = await _send(client, request, out)
            if fault:
                shown = (request.content or b"")[:500]
                out.faults.append(f"request {number}: {request.method} {request.path}: {fault}\n  {shown!r}")

        await asyncio.gather(*(one(number, request) for number, request in enumerate(requests)))
    return out


async def _send(client: httpx.AsyncClient, request: Request, out: Outcome) -> str | None:
    headers = {"content-type": "application/json"} if request.content is not None else {}
    try:
        async with asyncio.timeout(request.leave_after):
            reply = await client.request(request.method, request.path, content=request.content, headers=headers)
    except TimeoutError:
        out.left += 1
        return None
    except httpx.HTTPError as error:
        return f"no answer: {error!r}"
    out.statuses[reply.status_code] += 1
    return fault_of(reply)


def fault_of(reply: httpx.Response) -> str | None:
    """What is wrong with an answer, None if nothing is."""
    if reply.status_code >= 500:
        return f"{reply.status_code} {reply.text[:300]}"
    kind = reply.headers.get("content-type", "").partition(";")[0]
    try:
        if kind == "application/json":
            msgspec.json.decode(reply.content)
        elif kind == "text/event-stream":
            return _fault_of_events(reply.content)
        elif reply.content:
            return f"an answer of type {kind}: {reply.text[:100]}"
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        return f"an answer that does not parse ({error}): {reply.content[:300]!r}"
    return None


def _fault_of_events(content: bytes) -> str | None:
    *blocks, rest = content.split(b"\n\n")
    if rest or not blocks:
        return f"a stream that ends within an event: {rest[:100]!r}"
    for block in blocks:
        data = block.split(b"data: ", 1)[1]
        if data != b"[DONE]":
            msgspec.json.decode(data)
            if b'"server_error"' in data or b'"api_error"' in data:
                return f"an error in a stream: {data[:300]!r}"
    return None


def main() -> int:
    """Send the requests that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    out = asyncio.run(fuzz(arguments.url, make_requests(arguments.seed, arguments.requests)))
    print(f"statuses {dict(sorted(out.statuses.items()))}, clients that left {out.left}, faults {len(out.faults)}")
    print("\n".join(out.faults))
    return bool(out.faults)


if __name__ == "__main__":
    raise SystemExit(main())
