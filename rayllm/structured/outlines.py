"""Regular expressions, and what can be written as one, by the library outlines_core, compiled in a workshop."""

import json
import re
from dataclasses import dataclass

import outlines_core

from rayllm.messages.structured import StructuredOutputs
from rayllm.structured.grammar import Bits, GrammarError, Vocabulary
from rayllm.structured.schemas import check_kept
from rayllm.structured.workshop import Spelling, Workshop


class OutlinesMatcher:
    """See `Matcher`."""

    def __init__(self, index: outlines_core.Index) -> None:
        self._inner = outlines_core.Guide(index)

    @property
    def complete(self) -> bool:
        """See `Matcher.complete`."""
        return bool(self._inner.is_finished())

    def fill(self, bits: Bits) -> None:
        """See `Matcher.fill`."""
        self._inner.write_mask_into(bits.ctypes.data, bits.size, bits.itemsize)

    def allows(self, token: int) -> None:
        """See `Matcher.allows`."""

    def consume(self, token: int) -> None:
        """See `Matcher.consume`."""
        try:
            self._inner.advance(token, return_tokens=False)
        except ValueError as error:
            raise GrammarError(f"token {token} may not follow") from error


@dataclass(frozen=True, slots=True, weakref_slot=True)
class OutlinesGrammar:
    """See `Grammar`."""

    index: outlines_core.Index

    def matcher(self) -> OutlinesMatcher:
        """See `Grammar.matcher`."""
        return OutlinesMatcher(self.index)


class Outlines:
    """See `Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._workshop = Workshop("outlines", vocabulary)
        self._workshop.start()

    def compile(self, asked: StructuredOutputs) -> OutlinesGrammar:
        """See `Backend.compile`."""
        return OutlinesGrammar(outlines_core.Index.from_binary(self._workshop.make(asked)))

    def close(self) -> None:
        """See `Backend.close`."""
        self._workshop.close()


class Maker:
    """See `rayllm.structured.workshop.Maker`."""

    def __init__(self, spelling: Spelling) -> None:
        tokens: dict[bytes, list[int]] = {}
        left_out = {*spelling.special, *spelling.ends}
        for token, piece in enumerate(spelling.pieces):
            if piece and token not in left_out:
                tokens.setdefault(piece, []).append(token)
        self._vocabulary = outlines_core.Vocabulary(spelling.ends[0], tokens)

    def make(self, asked: StructuredOutputs) -> bytes:
        """See `Maker.make`."""
        index = outlines_core.Index(_expression(asked), self._vocabulary)
        made: bytes = index.__reduce__()[1][0]
        return made


def _expression(asked: StructuredOutputs) -> str:
    match asked.form:
        case "regex":
            return asked.text()
        case "choice":
            return "|".join(f"({re.escape(choice)})" for choice in asked.choice or ())
        case "json" | "json_object":
            spaces = "" if asked.disable_any_whitespace else asked.whitespace_pattern
            check_kept(json.loads(asked.text()), "outlines")
            expression: str = outlines_core.json_schema.build_regex_from_schema(asked.text(), spaces)
            return expression
    raise GrammarError("outlines takes JSON, regular expressions and choices only; use another backend")
