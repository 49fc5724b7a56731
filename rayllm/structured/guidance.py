"""Grammars by the library llguidance. It works a token's mask out when it is needed, within limits of its own."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, TokenizerWrapper, grammar_from

from rayllm.messages.structured import StructuredOutputs
from rayllm.structured.grammar import Bits, GrammarError, Vocabulary
from rayllm.structured.schemas import closed, tags_of
from rayllm.structured.workshop import shown

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

COMPILING, STEP, STATES = 100_000, 100_000, 20_000
"""The library's own units: they keep compiling to about a second, a mask to some 10 ms and an output to some 40 MB."""


class GuidanceMatcher:
    """See `Matcher`."""

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner

    @property
    def complete(self) -> bool:
        """See `Matcher.complete`."""
        return bool(self._inner.is_accepting())

    def fill(self, bits: Bits) -> None:
        """See `Matcher.fill`."""
        self._inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._inner.is_error():
            raise GrammarError(shown(self._inner.get_error()))

    def allows(self, token: int) -> bool:
        """See `Matcher.allows`."""
        # Of what must follow, masks have the tokenizer's own tokens only; the library would take its parts as well.
        if forced := self._inner.compute_ff_tokens():
            return bool(token == forced[0])
        return bool(self._inner.validate_tokens([token]))

    def consume(self, token: int) -> None:
        """See `Matcher.consume`."""
        if not self._inner.consume_token(token):
            raise GrammarError(shown(self._inner.get_error()) or f"token {token} may not follow")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GuidanceGrammar:
    """See `Grammar`."""

    start: LLMatcher

    def matcher(self) -> GuidanceMatcher:
        """See `Grammar.matcher`."""
        return GuidanceMatcher(self.start.deep_copy())


class Guidance:
    """See `Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer = TokenizerWrapper(_Spelling(vocabulary))
        size, ends = len(vocabulary.pieces), list(vocabulary.ends)
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=size, eos_token=ends)
        self._limits = LLParserLimits(
            initial_lexer_fuel=2 * COMPILING, max_grammar_size=COMPILING, step_lexer_fuel=STEP,
            step_max_items=STEP // 4, max_lexer_states=STATES, verbose_errors=False,
        )  # fmt: skip

    def compile(self, asked: StructuredOutputs) -> GuidanceGrammar:
        """See `Backend.compile`."""
        try:
            source = _source(asked)
        except (ValueError, AssertionError) as error:
            raise GrammarError(shown(str(error))) from error
        start = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if start.is_error():
            raise GrammarError(shown(start.get_error()))
        return GuidanceGrammar(start)

    def close(self) -> None:
        """Nothing to end."""


def _source(asked: StructuredOutputs) -> str:
    form, text = asked.form, asked.text()
    if form in ("json", "json_object"):
        options: JsonCompileOptions = {"whitespace_flexible": not asked.disable_any_whitespace}
        if asked.whitespace_pattern is not None:
            options["whitespace_pattern"] = asked.whitespace_pattern
        schema = closed(json.loads(text)) if asked.disable_additional_properties else text
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    if form == "structural_tag":
        tags = [
            StructTag(trigger=tag.trigger, begin=tag.begin, grammar=json.dumps(tag.schema), end=tag.end)
            for tag in tags_of(json.loads(text))
        ]
        return StructTag.to_grammar(tags, assume_special=False)
    return grammar_from(form, text)  # type: ignore[arg-type]


class _Spelling:
    """A vocabulary as the library wants to see it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.ends[0]
        self.tokens = vocabulary.pieces
        self.special_token_ids = sorted(vocabulary.special | set(vocabulary.ends))
        self._tokenizer = vocabulary.tokenizer

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
        return ids
