"""What a library of structured outputs must offer here: grammars, and matchers that walk along them."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rayllm.config.model_facts import ModelFacts
from rayllm.errors import ModelError
from rayllm.messages.structured import StructuredOutputs
from rayllm.render.tokenizer import Tokenizer

Bits = npt.NDArray[np.int32]
"""A bit for each token, the lowest of a word first; of the tokens that may follow it is set."""


class GrammarError(Exception):
    """A grammar is wrong, or its library cannot do it; says why. Never leaves this room as it is."""


class Matcher(Protocol):
    """Where one output stands in its grammar. Knows nothing of the end of outputs: see `rayllm.structured.row`."""

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""
        ...

    def fill(self, bits: Bits) -> None:
        """Set `bits` to what may follow. Bits of end tokens may come out either way.

        Raises:
            GrammarError: the grammar has become too complex to go on.
        """
        ...

    def allows(self, token: int) -> bool | None:
        """Whether `fill` would set the bit of a token, no end token; None where only `fill` can ever tell."""
        ...

    def consume(self, token: int) -> None:
        """Go on by one token, which must be one that may follow.

        Raises:
            GrammarError: it may not.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar, which many outputs may follow."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning."""
        ...


class Backend(Protocol):
    """One library with one model's vocabulary. Its methods may be called from any thread, and take their time."""

    def compile(self, asked: StructuredOutputs) -> Grammar:
        """The grammar of a form, whose options are all set.

        Raises:
            GrammarError: it is wrong, or too large.
        """
        ...

    def close(self) -> None:
        """End what belongs to it. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How a model's tokens spell bytes."""

    pieces: list[bytes]
    """By id; nothing for ids without a token."""
    special: frozenset[int]
    """Tokens that stand for no text of a grammar."""
    ends: tuple[int, ...]
    """The model's end tokens, one at least."""
    tokenizer: Any

    @classmethod
    def load(cls, path: str | None, model: ModelFacts) -> "Vocabulary":
        """That of the tokenizer at `path`.

        Raises:
            GrammarError: there is none that could be used.
        """
        if path is None:
            raise GrammarError("this server has no tokenizer, which grammars need")
        if not model.eos_token_ids:
            raise GrammarError("this model has no end token, so no output could end where its grammar does")
        try:
            tokenizer = Tokenizer.load(path)
            pieces = [tokenizer.piece(token) for token in range(model.vocab_size)]
        except ModelError as error:
            raise GrammarError(f"this model's tokenizer cannot be used for grammars: {error}") from error
        return cls(pieces, tokenizer.special.ids, model.eos_token_ids, tokenizer)
