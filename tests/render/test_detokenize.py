"""Text that comes token by token equals the text of the whole."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayllm.render.detokenize import Detokenizer
from rayllm.render.tokenizer import Tokenizer

from .samples import ODD_TEXTS, byte_level, sentencepiece


@cache
def sample(kind: str) -> Tokenizer:
    return byte_level() if kind == "byte_level" else sentencepiece()


kinds = st.sampled_from(["byte_level", "sentencepiece"])
id_lists = st.lists(st.integers(0, 300), max_size=30)


@given(kinds, id_lists, st.booleans(), st.booleans(), st.integers(1, 4))
def test_joined_pieces_equal_the_whole(kind, ids, skip, continues, step):
    tokenizer = sample(kind)
    detokenizer = Detokenizer(tokenizer, skip, continues)
    joined = "".join(detokenizer.feed(ids[i : i + step]) for i in range(0, len(ids), step)) + detokenizer.finish()
    assert joined == tokenizer.decode(ids, skip, continues)


@pytest.mark.parametrize("text", ODD_TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_characters_come_whole(kind, text):
    tokenizer = sample(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, continues=False)
    pieces = [detokenizer.feed([i]) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    # A tokenizer that puts a space in front takes one away again, also where the text had its own.
    assert "".join(pieces) + detokenizer.finish() == (text.removeprefix(" ") if kind == "sentencepiece" else text)


@given(st.text(max_size=20), st.integers(1, 20))
def test_a_cut_text_is_a_prefix_but_for_its_broken_end(text, cut):
    tokenizer = sample("byte_level")
    ids = tokenizer.encode(text)[:cut]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    shown = detokenizer.feed(ids)
    assert text.startswith(shown)
    assert detokenizer.finish() in ("", "\ufffd")


def test_incomplete_bytes_at_the_end():
    tokenizer = sample("byte_level")
    ids = tokenizer.encode("🫡")
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed(ids[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_space_after_a_prompt_is_kept_and_one_at_the_start_is_not():
    tokenizer = sample("sentencepiece")
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert Detokenizer(tokenizer, continues=True).feed(ids) == " the"
    assert Detokenizer(tokenizer, continues=False).feed(ids) == "the"


def test_special_tokens_are_skipped_or_shown():
    tokenizer = sample("byte_level")
    ids = tokenizer.encode("Hello<|end|>")
    assert Detokenizer(tokenizer).feed(ids) == "Hello"
    assert Detokenizer(tokenizer, skip_special_tokens=False).feed(ids) == "Hello<|end|>"
