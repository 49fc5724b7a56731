"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Watches one text for stop strings.

    Of all matches the one that ends first counts, and among those ending together the one that begins first. The text
    up to it is all that is let through, whatever the pieces were; text that might be the beginning of a match is held
    back until it is certain.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include` lets the stop string itself through."""
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def feed(self, text: str, search: bool = True) -> str:
        """The text that may be shown now.

        With `search` false no match ends in this piece, as before `min_tokens`; one may still begin in it.
        After a match (`matched` is set) nothing more comes.
        """
        if self.matched is not None or not text:
            return ""
        old = len(self._held)
        window = self._held + text
        if search and (match := self._first_match(window, old)):
            start, end, self.matched = match
            self._held = ""
            return window[:end] if self._include else window[:start]
        keep = self._held_from(window)
        self._held = window[keep:]
        return window[:keep]

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, window: str, old: int) -> tuple[int, int, str] | None:
        """(start, end, stop) of the match that ends first, past the `old` characters searched before."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                if best is None or (end, start) < (best[1], best[0]):
                    best = (start, end, stop)
        return best

    def _held_from(self, window: str) -> int:
        """Where the longest end of `window` begins that a stop string begins with; its length if there is none."""
        first = len(window)
        for stop in self._stops:
            at = window.find(stop[0], max(0, len(window) - len(stop) + 1))
            while 0 <= at < first:
                if stop.startswith(window[at:]):
                    first = at
                    break
                at = window.find(stop[0], at + 1)
        return first
