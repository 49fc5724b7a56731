"""Messages of gRPC to and from the JSON of the HTTP API.

Requests raise a RequestError where they hold what JSON cannot, numbers that are not finite, or text that should be JSON
and is not.
"""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import ListValue, Struct

from rayllm.errors import RequestError
from rayllm.grpc import rayllm_pb2 as pb

Json = dict[str, Any]

_LARGEST_WHOLE = 2**53
"""Up to which a double holds every whole number."""


def chat_fields(request: pb.ChatRequest) -> Json:
    """The fields of `rayllm.api.wire.ChatRequest`."""
    fields = _fields(request)
    if (alternatives := fields.pop("logprobs", None)) is not None:
        fields |= {"logprobs": True, "top_logprobs": alternatives}
    return fields


def completion_fields(request: pb.CompletionRequest) -> Json:
    """The fields of `rayllm.api.wire.CompletionRequest`."""
    fields = _fields(request)
    match request.WhichOneof("prompt"):
        case "text":
            fields["prompt"] = fields.pop("text")
        case "token_ids":
            del fields["token_ids"]
            fields["prompt"] = list(request.token_ids.ids)
    return fields


def token_fields(request: pb.TokenizeRequest | pb.DetokenizeRequest) -> Json:
    """The fields of `rayllm.api.wire.TokenizeRequest` or `DetokenizeRequest`."""
    fields = _fields(request)
    if isinstance(request, pb.DetokenizeRequest):
        fields.setdefault("tokens", [])
    return fields


def answer(body: Json) -> pb.Answer:
    """A whole answer, or a chunk of one, of either endpoint."""
    out = pb.Answer(id=body["id"], created=body["created"], model=body["model"])
    out.choices.extend(map(_choice, body["choices"]))
    prompt_ids = body.get("prompt_token_ids")
    if not prompt_ids and body["choices"]:
        prompt_ids = body["choices"][0].get("prompt_token_ids")
    out.prompt_token_ids.extend(prompt_ids or ())
    if usage := body.get("usage"):
        read, written = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
        counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        cached, reasoning = read.get("cached_tokens"), written.get("reasoning_tokens")
        out.usage.CopyFrom(pb.Usage(**counts, cached_tokens=cached, reasoning_tokens=reasoning))
    return out


def tokenize_answer(body: Json) -> pb.TokenizeAnswer:
    """The answer of `/tokenize`."""
    length, strings = body["max_model_len"], body["token_strs"]
    return pb.TokenizeAnswer(tokens=body["tokens"], token_strs=strings or (), max_model_len=length)


def models_answer(body: Json) -> pb.ListModelsAnswer:
    """The answer of `/v1/models`."""
    cards = [pb.Model(id=card["id"], max_model_len=card["max_model_len"]) for card in body["data"]]
    return pb.ListModelsAnswer(models=cards)


def _fields(message: Message) -> Json:
    """The fields that are set, those of `parameters` among them."""
    fields: Json = {}
    for field, value in message.ListFields():
        if isinstance(value, pb.Parameters):
            fields |= _fields(value)
        elif field.name == "messages":
            fields["messages"] = [_message(each) for each in value]
        elif field.name == "tools":
            fields["tools"] = [_tool(each, f"tools[{i}]") for i, each in enumerate(value)]
        elif field.name == "tool_choice":
            fields["tool_choice"] = value.mode or _named(value.function)
        elif isinstance(value, pb.StructuredOutputs):
            fields[field.name] = _fields(value)
        elif field.name == "logit_bias":
            fields["logit_bias"] = {str(token_id): _finite(bias, "logit_bias") for token_id, bias in value.items()}
        elif isinstance(value, Struct):
            fields[field.name] = _plain(value, field.name)
        elif isinstance(value, float):
            fields[field.name] = _finite(value, field.name)
        else:
            fields[field.name] = list(value) if field.is_repeated else value
    return fields


def _message(message: pb.Message) -> Json:
    fields = {name: value for name in ("tool_call_id", "name", "reasoning") if (value := getattr(message, name))}
    calls = [
        {**({"id": call.id} if call.id else {}), "type": "function", "function": _fields(call.function)}
        for call in message.tool_calls
    ]
    # Unlike other fields, an empty content is one.
    return {"role": message.role, "content": message.content, **fields, **({"tool_calls": calls} if calls else {})}


def _tool(tool: pb.Tool, place: str) -> Json:
    function = _fields(tool.function)
    if "parameters" in function:
        place = f"{place}.function.parameters"
        try:
            msgspec.json.decode(function["parameters"])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RequestError(f"{place} is not JSON: {error}", place) from None
        function["parameters"] = msgspec.Raw(function["parameters"].encode())
    return {"type": "function", "function": function}


def _named(function: str) -> Json:
    return {"type": "function", "function": {"name": function}}


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise RequestError(f"{name} must be finite, not {value}", name)
    return value


def _plain(value: Any, name: str) -> Any:
    """A value of a Struct, which holds all numbers as doubles."""
    match value:
        case Struct():
            return {key: _plain(part, name) for key, part in value.items()}
        case ListValue():
            return [_plain(part, name) for part in value]
        case float():
            whole = _finite(value, name).is_integer() and abs(value) <= _LARGEST_WHOLE
            return int(value) if whole else value
    return value


def _choice(choice: Json) -> pb.Choice:
    said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    out = pb.Choice(
        index=choice["index"],
        role=said.get("role"),
        text=said.get("content"),
        token_ids=choice.get("token_ids"),
        finish_reason=choice.get("finish_reason"),
        tool_calls=[_tool_call(i, call) for i, call in enumerate(said.get("tool_calls") or ())],
        reasoning=said.get("reasoning"),
    )
    match choice.get("stop_reason"):
        case str() as text:
            out.stop = text
        case int() as token_id:
            out.stop_token_id = token_id
    if logprobs := choice.get("logprobs"):
        chat = "content" in logprobs
        out.logprobs.extend(_of_chat(logprobs["content"]) if chat else _of_text(logprobs))
    return out


def _tool_call(place: int, call: Json) -> pb.ToolCall:
    # Only those of streams tell their index.
    index = call.get("index", place)
    return pb.ToolCall(index=index, id=call.get("id"), function=pb.CalledFunction(**call["function"]))


def _of_chat(tokens: Iterable[Json]) -> Iterable[pb.TokenLogprobs]:
    for token in tokens:
        top = [pb.TokenLogprob(token=each["token"], logprob=each["logprob"]) for each in token["top_logprobs"]]
        yield pb.TokenLogprobs(token=token["token"], logprob=token["logprob"], top_logprobs=top)


def _of_text(logprobs: Json) -> Iterable[pb.TokenLogprobs]:
    columns = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, logprob, alternatives in columns:
        top = [pb.TokenLogprob(token=name, logprob=value) for name, value in (alternatives or {}).items()]
        yield pb.TokenLogprobs(token=token, logprob=logprob, top_logprobs=top)
