"""Embeddings in place of text: what requests that hold some may ask, and where they stand in a conversation."""

from collections.abc import Sequence
from typing import Any

from rayllm.api.front import Front
from rayllm.api.wire import SamplingFields
from rayllm.errors import RequestError
from rayllm.messages.embeds import FIELD, decoded, saved_shape
from rayllm.messages.engine import Embeds
from rayllm.render.embeds import HOLE, mark

Json = dict[str, Any]


def check_embeds(front: Front, request: SamplingFields) -> None:
    """Refuse embeddings where the server takes none, and what needs the tokens that they stand for.

    Raises:
        RequestError: names the field.
    """
    if not front.settings.prompt_embeds:
        raise RequestError("prompt_embeds are not taken; start the server with --enable-prompt-embeds", FIELD)
    for name in ("echo", "truncate_prompt_tokens", "prompt_logprobs"):
        if (asked := getattr(request, name)) is not None and asked is not False:
            raise RequestError(f"{name} needs the tokens of the prompt, which prompt_embeds do not tell", name)


def marked(messages: Sequence[Any]) -> tuple[list[Any], list[bytes]]:
    """Messages with a mark, as text, for each part of type `prompt_embeds`; and the files of these parts.

    Raises:
        RequestError: such a part holds no embeddings.
    """
    found: list[bytes] = []

    def of_part(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") != FIELD:
            return part
        if unknown := part.keys() - {"type", "data"}:
            raise RequestError(f"a part of type {FIELD!r} holds data, and no {min(unknown)}", FIELD)
        found.append(decoded(part.get("data")))
        return {"type": "text", "text": mark(len(found) - 1)}

    def of_message(message: Any) -> Any:
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            return message
        return {**message, "content": [of_part(part) for part in message["content"]]}

    return [of_message(message) for message in messages], found


def lengths(files: Sequence[bytes]) -> list[int]:
    """How many tokens each of the files stands for.

    Raises:
        RequestError: one holds no embeddings.
    """
    return [saved_shape(saved)[0] for saved in files]


def placed(ids: Sequence[int], files: Sequence[bytes], lengths: Sequence[int]) -> tuple[list[int], tuple[Embeds, ...]]:
    """A prompt with holes, as the renderer leaves them, with 0 in these; and the files that fill them."""
    holes = [at for at, token in enumerate(ids) if token == HOLE]
    embeds, taken = [], 0
    for saved, length in zip(files, lengths, strict=True):
        embeds.append(Embeds(holes[taken], saved))
        taken += length
    return [0 if token == HOLE else token for token in ids], tuple(embeds)
