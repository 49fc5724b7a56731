"""What a parser finds in an answer, in the order in which it comes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. Calls of one answer are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of a call are complete. A call that was cut has none of these."""

    index: int


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


def joined(events: Iterable[Event]) -> list[Event]:
    """The events, with neighbours that add to the same text as one."""
    out: list[Event] = []
    for _, run in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
        first, *others = run
        if others and not isinstance(first, CallStart | CallEnd):
            text = "".join(
                [first.text, *(event.text for event in others if not isinstance(event, CallStart | CallEnd))]
            )
            out.append(replace(first, text=text))
        else:
            out += [first, *others]
    return out
