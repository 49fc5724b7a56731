"""Ends the reasoning of an output once it is as long as its request allows."""

from rayllm.messages.sampling import Thinking
from rayllm.structured.row import Tokens, ends_with


class ThinkingLimit:
    """Follows the tokens of an output wherever they come from, so that one that was preempted, or begun in another
    engine, ends its reasoning at the same token.
    """

    def __init__(self, limit: Thinking) -> None:
        self._limit = limit
        self._seen = 0
        self._inside = limit.inside
        self._thoughts = 0
        self._closed = 0  # tokens of the end that was forced, so far

    def forced(self, output: Tokens) -> int | None:
        """The one token that may follow `output`, None where any may."""
        for at in range(self._seen, len(output)):
            self._take(output, at)
        self._seen = len(output)
        return self._limit.end_ids[self._closed] if self._spent else None

    @property
    def _spent(self) -> bool:
        return self._inside and self._thoughts >= self._limit.budget

    def _take(self, output: Tokens, at: int) -> None:
        limit = self._limit
        if not self._inside:
            self._inside = any(ends_with(output, at, ids) for ids in limit.begin_ids)
            return
        if self._spent:
            self._closed += 1
            self._inside = self._closed < len(limit.end_ids)
        elif any(ends_with(output, at, ids) for ids in limit.mark_ids):
            self._inside = False
        else:
            self._thoughts += 1
        if not self._inside:
            self._closed = 0
