"""The text of a choice does not depend on how the engine's steps were grouped on the way."""

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rayllm.api.choice import Choice, Echo, Piece
from rayllm.api.fake import FakeStream, Script
from rayllm.messages.engine import Add
from rayllm.messages.sampling import SamplingParams

from ..render.samples import byte_level

TOKENIZER = byte_level()
END = 0
# Bytes of whole and broken characters, letters, and special tokens.
tokens = st.lists(st.sampled_from([*TOKENIZER.encode("ab 龜🫠é."), 1, 2, 200, 230]), max_size=16)
stops = st.lists(st.sampled_from(["a", "ab", "b ", "龜", "\ufffd", ". ", "é.", "龜🫠"]), max_size=3, unique=True)


def cut(ids: list[int], bounds: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(b, len(ids)) for b in bounds), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def run(steps: list[list[int]], sampling: SamplingParams, ends: bool, echo: Echo | None) -> tuple[Piece, int, str]:
    add = Add(request_id=0, prompt_token_ids=[5, 6], sampling=sampling, arrival_time=0.0)
    script = Script(steps, "stop" if ends else "length", END if ends else None)
    choice = Choice(0, FakeStream(add, script), sampling, TOKENIZER, echo)

    async def collect() -> tuple[Piece, str]:
        whole, streamed = Piece(), ""
        async for piece in choice.pieces():
            streamed += piece.text
            whole.extend(piece)
        return whole, streamed

    whole, streamed = asyncio.run(collect())
    return whole, choice.completion_tokens, streamed


@given(
    tokens, stops, st.lists(st.integers(0, 16), max_size=4), st.booleans(), st.booleans(), st.booleans(),
    st.integers(0, 6), st.sampled_from([None, 0, 2]),
)  # fmt: skip
def test_grouping_changes_nothing(ids, stops, bounds, ends, include, echoed, min_tokens, logprobs):
    if ends:
        ids = [*ids, END]
    sampling = SamplingParams(
        stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=max(1, len(ids)),
        logprobs=logprobs, prompt_logprobs=logprobs if echoed else None,
    )  # fmt: skip
    echo = Echo("xy", [5, 6], [0, 1]) if echoed and logprobs is not None else Echo("xy") if echoed else None
    one, used, streamed = run([[i] for i in ids] or [[]], sampling, ends, echo)
    other = run(cut(ids, bounds), sampling, ends, echo)
    assert (one, used, streamed) == other
    assert streamed == one.text
    assert len(one.logprobs) == len(one.logprob_ids) == len(one.offsets) or logprobs is None
    if one.stop_reason is None:
        shown = ids[:-1] if ends and not include else ids
        assert one.text == ("xy" if echoed else "") + TOKENIZER.decode(shown, continues=True)
        assert used == len(ids)
    else:
        assert used >= min(min_tokens, len(ids))
        assert not include or one.text.endswith(one.stop_reason)
        assert include or min_tokens or one.stop_reason not in one.text
