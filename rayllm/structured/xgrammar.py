"""Grammars by the library xgrammar, compiled in a workshop."""

import json
import re
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import xgrammar

from rayllm.messages.structured import StructuredOutputs
from rayllm.structured.grammar import Bits, GrammarError, Vocabulary
from rayllm.structured.schemas import check_kept, tags_of
from rayllm.structured.workshop import Spelling, Workshop

LONGEST_MASK_S = 0.1
STEPS = 24
"""Tokens of the output on which a grammar is tried out."""
_PLACE = re.compile(r"\[[0-9:]+\] \S+:\d+: ")
"""Time and place of the library's source, in its errors."""


class XGrammarMatcher:
    """See `Matcher`."""

    def __init__(self, grammar: xgrammar.CompiledGrammar) -> None:
        self._inner = xgrammar.GrammarMatcher(grammar)

    @property
    def complete(self) -> bool:
        """See `Matcher.complete`."""
        return bool(self._inner.is_completed())

    def fill(self, bits: Bits) -> None:
        """See `Matcher.fill`."""
        began = time.perf_counter()
        bits.fill(-1)  # where all tokens may follow, the library leaves the bits alone
        self._inner.fill_next_token_bitmask(bits[None])
        if time.perf_counter() - began > LONGEST_MASK_S:
            raise GrammarError("the grammar is too ambiguous to be followed in time")

    def allows(self, token: int) -> None:
        """See `Matcher.allows`."""

    def consume(self, token: int) -> None:
        """See `Matcher.consume`."""
        if not self._inner.accept_token(token):
            raise GrammarError(f"token {token} may not follow")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class XGrammarGrammar:
    """See `Grammar`."""

    compiled: xgrammar.CompiledGrammar

    def matcher(self) -> XGrammarMatcher:
        """See `Grammar.matcher`."""
        return XGrammarMatcher(self.compiled)


class XGrammar:
    """See `Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = _tokens_of(vocabulary.pieces, vocabulary.special, vocabulary.ends)
        self._workshop = Workshop("xgrammar", vocabulary)
        self._workshop.start()

    def compile(self, asked: StructuredOutputs) -> XGrammarGrammar:
        """See `Backend.compile`."""
        made = self._workshop.make(asked).decode()
        return XGrammarGrammar(xgrammar.CompiledGrammar.deserialize_json(made, self._tokens))

    def close(self) -> None:
        """See `Backend.close`."""
        self._workshop.close()


class Maker:
    """See `rayllm.structured.workshop.Maker`."""

    def __init__(self, spelling: Spelling) -> None:
        self._size = len(spelling.pieces)
        self._ends = np.array(spelling.ends)
        tokens = _tokens_of(spelling.pieces, frozenset(spelling.special), spelling.ends)
        self._compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)

    def make(self, asked: StructuredOutputs) -> bytes:
        """See `Maker.make`."""
        try:
            grammar = self._compile(asked)
        except RuntimeError as error:
            raise GrammarError(_PLACE.sub("", str(error))) from error
        self._try_out(grammar)
        text: str = grammar.serialize_json()
        return text.encode()

    def _compile(self, asked: StructuredOutputs) -> xgrammar.CompiledGrammar:
        compiler, form, text = self._compiler, asked.form, asked.text()
        if asked.whitespace_pattern is not None:
            raise GrammarError("xgrammar knows no whitespace_pattern; use disable_any_whitespace, or another backend")
        if form in ("json", "json_object"):
            check_kept(json.loads(text), "xgrammar")
            return compiler.compile_json_schema(
                text, any_whitespace=not asked.disable_any_whitespace,
                separators=(",", ":") if asked.disable_any_whitespace else None,
                strict_mode=bool(asked.disable_additional_properties),
            )  # fmt: skip
        if form == "regex":
            return compiler.compile_regex(text)
        if form == "choice":
            texts = (json.dumps(choice, ensure_ascii=False) for choice in asked.choice or ())
            return compiler.compile_grammar(f"root ::= {' | '.join(texts)}")
        if form == "structural_tag":
            return compiler.compile_structural_tag(json.dumps(_tag_format(json.loads(text))))
        return compiler.compile_grammar(text) if "::=" in text else compiler.compile_lark(text)

    def _try_out(self, grammar: xgrammar.CompiledGrammar) -> None:
        """Follow the grammar for some tokens, for one that is slow would hold up others later."""
        matcher, bits, rng = (
            XGrammarMatcher(grammar),
            np.zeros(-(-self._size // 32), np.int32),
            np.random.default_rng(0),
        )
        for _ in range(STEPS):
            matcher.fill(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), count=self._size, bitorder="little"))
            texts = np.setdiff1d(allowed, self._ends)
            if not len(texts):
                return
            matcher.consume(int(rng.choice(texts)))


def _tokens_of(pieces: list[bytes], special: frozenset[int], ends: tuple[int, ...]) -> xgrammar.TokenizerInfo:
    """Must be the same on both sides: compiled grammars hold places in its order of the tokens."""
    # What has no bytes is in no grammar.
    spelled = [b"" if token in special else piece for token, piece in enumerate(pieces)]
    return xgrammar.TokenizerInfo(
        spelled, xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=list(ends)
    )  # fmt: skip


def _tag_format(value: dict[str, Any]) -> dict[str, Any]:
    """Structural tags in the library's own notation, in which they may be given too."""
    if "format" in value:
        return {"type": "structural_tag", "format": value["format"]}
    tags = tags_of(value)
    for tag in tags:
        check_kept(tag.schema, "xgrammar")
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": list(dict.fromkeys(tag.trigger for tag in tags)),
            "tags": [
                {"begin": tag.begin, "content": {"type": "json_schema", "json_schema": tag.schema}, "end": tag.end}
                for tag in tags
            ],
        },
    }
