"""Text that comes in pieces, read by generators: where one needs more text than there is, it yields.

That makes a state machine of code that reads like a parser of whole texts, so streams and whole answers are parsed by
the same lines.
"""

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads on, yielding whenever it waits for text."""
Emit = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]*")


class Broken(Exception):
    """What comes is not what was to come."""


class Truncated(Broken):
    """The text ended where more was to come."""


class Reader:
    """One text. What lies before its mark has been given out; the rest can be read again."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark = 0
        self._ended = False

    def push(self, text: str) -> None:
        """Append more text."""
        self._text = self._text[self._mark :] + text
        self._at -= self._mark
        self._mark = 0

    def end(self) -> None:
        """Say that no more text comes."""
        self._ended = True

    def mark(self) -> None:
        """All that has been read is given out."""
        self._mark = self._at

    def rewind(self) -> None:
        """Read what has not been given out once more."""
        self._at = self._mark

    @property
    def ungiven(self) -> str:
        """What has been read and not given out."""
        return self._text[self._mark : self._at]

    def drop(self) -> None:
        """Leave out all there is."""
        self._at = self._mark = len(self._text)

    def take(self) -> str:
        """The next character, which has been peeked at or is there for certain."""
        self._at += 1
        return self._text[self._at - 1]

    def peek(self) -> Reading[str]:
        """The next character, which is not consumed; empty at the end of the text."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def through(self, markers: tuple[str, ...], emit: Emit) -> Reading[str | None]:
        """Emit the text before the first of some markers, and consume that one; None if the text ends without.

        Only what may be the beginning of a marker waits.
        """
        pattern, firsts, longest = _scanner(markers)
        while True:
            if found := pattern.search(self._text, self._at):
                self._give(found.start(), emit)
                rest = self._text[self._at : self._at + longest]
                if self._ended or not any(m.startswith(rest) and m != rest for m in markers):
                    self._at = found.end()
                    return found[0]
                yield
                continue
            if self._ended:
                self._give(len(self._text), emit)
                return None
            start = max(self._at, len(self._text) - longest + 1)
            while start < len(self._text):
                if self._text[start] in firsts and any(m.startswith(self._text[start:]) for m in markers):
                    break
                start += 1
            self._give(start, emit)
            yield

    def rest(self, emit: Emit) -> Reading[None]:
        """Emit all the text that is left."""
        while True:
            self._give(len(self._text), emit)
            if self._ended:
                return
            yield

    def literal(self, *texts: str) -> Reading[str]:
        """Consume whichever of some texts comes next, and return it; empty if none does.

        Raises:
            Truncated: the text ends within one.
        """
        longest = max(map(len, texts))
        while True:
            for text in texts:
                if self._text.startswith(text, self._at):
                    self._at += len(text)
                    return text
            rest = self._text[self._at : self._at + longest]
            if not any(text.startswith(rest) for text in texts):
                return ""
            if self._ended:
                if rest:
                    raise Truncated
                return ""
            yield

    def expect(self, *texts: str) -> Reading[str]:
        """Consume whichever of some texts comes next, and return it.

        Raises:
            Broken: none does.
        """
        if found := (yield from self.literal(*texts)):
            return found
        raise Truncated if self._at == len(self._text) else Broken

    def space(self) -> Reading[str]:
        """Consume white space."""
        return (yield from self.run(_SPACE))

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Consume what a pattern matches; it must be a repetition of one class of characters."""
        text = ""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None:
                text += match[0]
                self._at = match.end()
            if self._at < len(self._text) or self._ended:
                return text
            yield

    def some(self, pattern: re.Pattern[str]) -> Reading[str]:
        """As `run`, but at least one character.

        Raises:
            Broken: there is none.
        """
        if text := (yield from self.run(pattern)):
            return text
        raise Truncated if self._at == len(self._text) else Broken

    def _give(self, end: int, emit: Emit) -> None:
        if end > self._at:
            text = self._text[self._at : end]
            self._at = end
            emit(text)


@cache
def _scanner(markers: tuple[str, ...]) -> tuple[re.Pattern[str], str, int]:
    """A pattern of the markers, their first characters, and the length of the longest."""
    by_length = sorted(markers, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, by_length))), "".join(m[0] for m in markers), len(by_length[0])
