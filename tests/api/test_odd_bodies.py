"""Bodies that no client should send: each is answered or refused, by any endpoint, and nothing is left running."""

import copy
import json
import random

import pytest

from .conftest import Harness, strict_json

SAY = [{"role": "user", "content": "hi"}]
TEXT = [{"type": "text", "text": "a"}]
BODIES = {
    "/v1/chat/completions": {"messages": SAY, "max_tokens": 3, "n": 2, "stop": ["x"], "logprobs": True},
    "/v1/chat/completions/batch": {"messages": [SAY, SAY], "max_tokens": 3},
    "/v1/chat/completions/render": {"messages": SAY, "documents": [], "chat_template_kwargs": {}, "seed": 1},
    "/v1/completions": {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "logit_bias": {"5": 1},
                        "use_beam_search": False, "length_penalty": 1.0},
    "/v1/completions/render": {"prompt": [1, 2], "truncate_prompt_tokens": 1, "truncation_side": "left"},
    "/v1/messages": {
        "max_tokens": 3, "system": TEXT, "stop_sequences": ["x"], "thinking": {"type": "disabled"},
        "messages": [
            *SAY,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": TEXT}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "none"},
    },
    "/v1/messages/count_tokens": {"messages": SAY, "output_config": {"format": None}},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}], "content": None},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "d"},
        ],
        "text": {"format": {"type": "text"}}, "reasoning": {"summary": "auto"}, "include": [], "metadata": {"a": "b"},
        "tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": "none", "max_output_tokens": 3,
    },
    "/v1/responses/input_tokens": {"input": "hi", "instructions": "be"},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "logprobs": 1, "n": 1}},
    "/inference/v1/abort_requests": {"request_ids": ["a"]},
    "/collective_rpc": {"method": "m", "args": [1], "kwargs": {"a": 1}, "timeout": 1.0},
    "/tokenize": {"messages": SAY, "add_generation_prompt": True},
    "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip
ODD = [None, True, 0, -1, 1.5, 2**70, 1e308, "", "x", "\ud800", "\u0000", "龜🫠", "a" * 5000, [], {}, [[]], [None],
       {"a": {}}, {"type": "text"}, {"type": 5}, [{"type": "message"}], [1, "a"], {"": None}]  # fmt: skip


def places(value, path=()):
    """The paths to everything inside a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def mutated(body, rng):
    out = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        found = list(places(out))
        if not found:
            break
        path = rng.choice(found)
        holder = out
        for key in path[:-1]:
            holder = holder[key]
        match rng.randrange(5):
            case 0:
                del holder[path[-1]]
            case 1 if isinstance(holder, dict):
                holder[f"{path[-1]}s"] = holder.pop(path[-1])
            case 2:
                deep = copy.deepcopy(rng.choice(ODD))
                for _ in range(rng.choice((5, 300))):
                    deep = [deep]
                holder[path[-1]] = deep
            case _:
                holder[path[-1]] = copy.deepcopy(rng.choice(ODD))
    if rng.random() < 0.2:
        out["stream"] = rng.choice((True, 1, None))
    return out


@pytest.mark.parametrize("path", BODIES)
async def test_no_body_is_a_server_error(path):
    api = Harness(dev_mode=True, max_model_len=200)
    api.service.answer = [] if path == "/collective_rpc" else 0
    rng = random.Random(path)
    for _ in range(250):
        body = mutated(BODIES[path], rng)
        reply = await api.request(
            "POST", path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        assert reply.status_code < 500, (body, reply.text)
        if reply.headers["content-type"].startswith("application/json"):
            strict_json(reply.content)
        elif reply.status_code == 200:
            assert b"server_error" not in reply.content, body
    reply = await api.request("POST", path, json=BODIES[path])
    assert reply.status_code == 200, reply.text
