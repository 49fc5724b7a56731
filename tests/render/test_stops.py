"""Stop strings against a search of the whole text."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rayllm.render.stops import StopStrings

texts = st.text(alphabet="ab ", max_size=40)
stops = st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), min_size=1, max_size=4)
cuts = st.lists(st.integers(0, 40), max_size=12)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    ends = [(at + len(s), at, s) for s in stops for at in range(len(text)) if text.startswith(s, at)]
    if not ends:
        return text, None
    end, start, stop = min(ends)
    return text[: end if include else start], stop


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@given(texts, stops, cuts, st.booleans())
def test_any_pieces_give_the_text_up_to_the_first_match(text, stops, cuts, include):
    watch = StopStrings(stops, include)
    out = "".join(watch.feed(piece) for piece in pieces_of(text, cuts)) + watch.finish()
    assert (out, watch.matched) == reference(text, stops, include)


@given(texts, stops, cuts)
def test_only_a_possible_beginning_is_held_back(text, stops, cuts):
    watch = StopStrings(stops)
    seen = shown = ""
    for piece in pieces_of(text, cuts):
        seen += piece
        shown += watch.feed(piece)
        if watch.matched is None:
            held = seen[len(shown) :]
            assert seen.startswith(shown)
            assert held == "" or any(s.startswith(held) and s != held for s in stops)


def test_no_match_ends_in_a_piece_that_is_not_searched():
    watch = StopStrings(["ab"])
    assert watch.feed("xab", search=False) == "xab"
    assert watch.feed("cab", search=True) == "c"
    assert watch.matched == "ab"


def test_a_match_may_begin_in_a_piece_that_is_not_searched():
    watch = StopStrings(["ab"])
    assert watch.feed("xa", search=False) == "x"
    assert watch.feed("b") == ""
    assert watch.matched == "ab"


def test_nothing_follows_a_match():
    watch = StopStrings(["."])
    assert watch.feed("one. two") == "one"
    assert watch.feed("three") == ""
    assert watch.finish() == ""
