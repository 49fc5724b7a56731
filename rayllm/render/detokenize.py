"""Tokens to text as they come: one `Detokenizer` for each choice of a request."""

import codecs
from collections.abc import Iterable

from rayllm.render.tokenizer import Tokenizer


class Detokenizer:
    """Turns token ids into text, piece by piece.

    The joined pieces equal `Tokenizer.decode` of all ids. No piece ends inside a character: its first bytes wait for
    the rest. Bytes that never become a character turn into U+FFFD as soon as that is certain, at the latest in
    `finish`. Costs O(1) a token.

    No supported decoder puts spaces between special tokens, so both values of `spaces_between_special_tokens` mean
    the same text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        continues: bool = True,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """`continues` says that the ids follow a prompt, so that a space before the first word is kept.

        `kept` are special tokens that are not skipped.
        """
        self._piece = tokenizer.piece
        self._skipped = tokenizer.special.ids - kept if skip_special_tokens else frozenset()
        self._strip = not continues and tokenizer.strips_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        skipped, piece = self._skipped, self._piece
        data = b"".join([piece(i) for i in ids if i not in skipped])
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end: U+FFFD where the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)
