"""The grammar of one output, which follows the output's tokens wherever they come from."""

from collections.abc import Callable

import numpy as np

from rayllm.structured.grammar import Bits, Grammar, GrammarError, Matcher

Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]


class RowGrammar:
    """Catches up with the tokens of an output before each mask, so that it is the same for one that was just
    sampled, preempted, or begun in another engine.
    """

    def __init__(
        self, grammar: Callable[[], Grammar], after: tuple[int, ...], ends: tuple[int, ...], stops: tuple[int, ...]
    ) -> None:
        """The output is free until the tokens `after` stand in it. When it is complete it may be followed by the
        model's `ends`, which follow nothing else, and by `stops`.
        """
        self._grammar = grammar
        self._matcher: Matcher | None = None
        self._after = after
        self._ends, self._stops = list(map(_place, ends)), list(map(_place, stops))
        self._known = frozenset((*ends, *stops))
        self._seen = 0
        self._begun = not after
        self._ended = False
        self.must_end = False
        """Whether only such tokens may follow, as `fill` found."""

    def fill(self, output: Tokens, bits: Bits) -> None:
        """Set `bits` to the tokens that may follow `output`.

        Raises:
            GrammarError: the output left the grammar, or nothing can follow it.
            RequestError: the grammar cannot be had.
        """
        if self._matcher is None:
            self._matcher = self._grammar().matcher()
        for at in range(self._seen, len(output)):
            self._take(self._matcher, output, at)
        self._seen = len(output)
        self.must_end = False
        if not self._begun:
            bits.fill(-1)
            return
        complete = self._ended
        if self._ended:
            bits.fill(0)
        else:
            self._matcher.fill(bits)
            complete = self._matcher.complete
        for word, mask in self._ends:
            bits[word] &= ~mask
        nothing = not bits.any()
        if not complete:
            if nothing:
                raise GrammarError("no token of this model can follow")
            return
        self.must_end = nothing
        for word, mask in (*self._ends, *self._stops):
            bits[word] |= mask

    def _take(self, matcher: Matcher, output: Tokens, at: int) -> None:
        token = int(output[at])
        if not self._begun:
            begin = at + 1 - len(self._after)
            self._begun = begin >= 0 and tuple(output[begin : at + 1].tolist()) == self._after
        elif not self._ended:
            if token in self._known and matcher.complete:
                self._ended = True
            else:
                matcher.consume(token)


def _place(token: int) -> tuple[int, np.int32]:
    """The word and the mask of a token's bit."""
    return token >> 5, np.uint32(1 << (token & 31)).view(np.int32)
