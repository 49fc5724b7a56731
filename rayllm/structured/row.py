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
        self,
        grammar: Callable[[], Grammar],
        after: tuple[tuple[int, ...], ...],
        ends: tuple[int, ...],
        stops: tuple[int, ...],
        begins: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        """The output is free until the tokens of one of `after` stand in it; where there are `begins`, only if it
        begins with one of them. When it is complete it may be followed by the model's `ends`, which follow nothing
        else, and by `stops`.
        """
        self._grammar = grammar
        self._matcher: Matcher | None = None
        self._after = after
        self._ends, self._stops = list(map(_place, ends)), list(map(_place, stops))
        self._known = frozenset((*ends, *stops))
        self._seen = 0
        self._free = bool(after) and not begins
        self._maybe = begins if after else ()
        """Those with which the output may still begin."""
        self._lost = False
        """Whether the output is the beginning of one of these, and of nothing that has the form."""
        self._ended = False
        self.must_end = False
        """Whether only such tokens may follow, as `fill` found."""
        self.tells = True
        """Whether `allows` is worth asking; known once it was asked."""

    def fill(self, output: Tokens, bits: Bits) -> None:
        """Set `bits` to the tokens that may follow `output`.

        Raises:
            GrammarError: the output left the grammar, or nothing can follow it.
            RequestError: the grammar cannot be had.
        """
        matcher = self._follow(output)
        self.must_end = False
        if self._free:
            bits.fill(-1)
            for word, mask in self._ends:
                bits[word] &= ~mask
            return
        complete = self._ended
        if self._ended or self._lost:
            bits.fill(0)
        else:
            matcher.fill(bits)
            complete = matcher.complete
        for word, mask in self._ends:
            bits[word] &= ~mask
        for begin in self._maybe:
            word, mask = _place(begin[len(output)])
            bits[word] |= mask
        nothing = not bits.any()
        if not complete:
            if nothing:
                raise GrammarError("no token of this model can follow")
            return
        self.must_end = nothing
        for word, mask in (*self._ends, *self._stops):
            bits[word] |= mask

    def allows(self, output: Tokens, token: int) -> bool:
        """Whether a token may follow `output`, as far as that can be told for less than `fill` takes: no where not.

        Raises:
            GrammarError: the output left the grammar.
            RequestError: the grammar cannot be had.
        """
        matcher = self._follow(output)
        if token in self._known or self._maybe or self._lost or self._ended:
            return False
        if self._free:
            return True
        told = matcher.allows(token)
        self.tells = told is not None
        return bool(told)

    def _follow(self, output: Tokens) -> Matcher:
        """Catch up with the output."""
        if self._matcher is None:
            self._matcher = self._grammar().matcher()
        for at in range(self._seen, len(output)):
            self._take(output, at)
        self._seen = len(output)
        return self._matcher

    def _take(self, output: Tokens, at: int) -> None:
        assert self._matcher is not None
        token = int(output[at])
        if self._free:
            self._free = not any(ends_with(output, at, ids) for ids in self._after)
            return
        self._maybe = tuple(begin for begin in self._maybe if begin[at] == token)
        if any(len(begin) == at + 1 for begin in self._maybe):
            self._free, self._maybe, self._lost = True, (), False
            self._matcher = self._grammar().matcher()
        elif self._lost and not self._maybe:
            raise GrammarError("the output begins as reasoning does, and is none")
        elif not self._ended and not self._lost:
            self._go_on(self._matcher, token)

    def _go_on(self, matcher: Matcher, token: int) -> None:
        if token in self._known and matcher.complete:
            self._ended = True
            return
        try:
            matcher.consume(token)
        except GrammarError:
            if not self._maybe:
                raise
            self._lost = True


def ends_with(output: Tokens, at: int, ids: tuple[int, ...]) -> bool:
    """Whether the tokens up to `output[at]` end with these."""
    begin = at + 1 - len(ids)
    return begin >= 0 and tuple(output[begin : at + 1].tolist()) == ids


def _place(token: int) -> tuple[int, np.int32]:
    """The word and the mask of a token's bit."""
    return token >> 5, np.uint32(1 << (token & 31)).view(np.int32)
