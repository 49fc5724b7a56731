"""Where embeddings stand in the text of a conversation: marks in its contents, holes among its tokens."""

from collections.abc import Callable, Sequence

from rayllm.errors import RequestError

HOLE = -1
"""Stands in a prompt for each token that embeddings fill."""


def mark(number: int) -> str:
    """What holds the place of embeddings in a content."""
    return f"\ue0f2embeddings {number}\ue0f2"


def encode_around(text: str, lengths: Sequence[int], encode: Callable[[str, bool], list[int]]) -> list[int]:
    """Token ids of a text with `lengths[i]` holes in place of the i-th mark. `encode` gets the texts between marks, and
    whether they begin the whole.

    Raises:
        RequestError: the marks do not stand in the text once and in order.
    """
    ids: list[int] = []
    rest = text
    for number, length in enumerate(lengths):
        before, found, rest = rest.partition(mark(number))
        if not found or text.count(mark(number)) != 1:
            message = "the chat template does not show all parts of the conversation once and in order"
            raise RequestError(f"prompt_embeds cannot be placed: {message}", "prompt_embeds")
        ids += encode(before, number == 0) if before else []
        ids += [HOLE] * length
    return ids + (encode(rest, False) if rest else [])
