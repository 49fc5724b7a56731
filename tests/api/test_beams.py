"""Beam search, over a model whose next token depends on the last one alone."""

import itertools
import math
import random

import pytest

from rayllm.api.beams import beam_search
from rayllm.errors import GenerationFailed
from rayllm.messages.engine import Add
from rayllm.messages.ingress import RequestOutput, TokenLogprobs
from rayllm.messages.sampling import SamplingParams

from .conftest import ok, refused

EOS = 0


class Chain:
    """A service over a table of log-probabilities."""

    def __init__(self, vocab, seed):
        rng = random.Random(seed)
        rows = [[rng.random() ** 3 + 1e-3 for _ in range(vocab)] for _ in range(vocab)]
        self.table = [[math.log(p / sum(row)) for p in row] for row in rows]
        self.calls = 0

    async def submit(self, adds):
        self.calls += 1
        return [_Stream(self, add) for add in adds]


class _Stream:
    def __init__(self, chain, add):
        self.chain, self.add = chain, add

    def abort(self, reason="abort"):
        pass

    async def __aiter__(self):
        assert self.add.sampling.logprobs <= len(self.chain.table)
        row = self.chain.table[[*self.add.prompt_token_ids, *self.add.output_token_ids][-1]]
        assert self.add.sampling.max_tokens == len(self.add.output_token_ids) + 1
        best = sorted(range(len(row)), key=row.__getitem__, reverse=True)[: self.add.sampling.logprobs]
        token = TokenLogprobs(best[0], row[best[0]], 1, best, [row[i] for i in best])
        yield RequestOutput(0, [best[0]], "length", logprobs=[token], cached_tokens=3)


def adds(n, max_tokens, **more):
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, **more)
    one = {"request_id": 0, "prompt_token_ids": [1], "sampling": sampling, "arrival_time": 0.0}
    return [Add(**one, choice_index=i) for i in range(n)]


async def found(chain, n, max_tokens, penalty=1.0, ends=(EOS,), **more):
    streams = await beam_search(chain, adds(n, max_tokens, **more), frozenset(ends), penalty, len(chain.table))
    return [output for stream in streams async for output in stream]


def every(chain, max_tokens, penalty, least=0):
    """All continuations, the best first."""
    vocab = range(len(chain.table))
    out = []
    for length in range(1, max_tokens + 1):
        for ids in itertools.product(vocab, repeat=length):
            ends = ids[-1] == EOS
            if EOS in ids[:-1] or (ends and length < least) or (not ends and length < max_tokens):
                continue
            total = sum(chain.table[a][b] for a, b in itertools.pairwise((1, *ids)))
            out.append((total / length**penalty, list(ids)))
    return [ids for _, ids in sorted(out, reverse=True)]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(4))
async def test_wide_beams_find_the_best_there_are(penalty, seed):
    chain = Chain(4, seed)
    outputs = await found(chain, 30, 3, penalty)
    assert [output.token_ids for output in outputs] == every(chain, 3, penalty)[:30]
    for output in outputs:
        assert (output.finish_reason == "stop") == (output.token_ids[-1] == EOS)


async def test_one_beam_is_greedy():
    chain = Chain(9, 5)
    [output] = await found(chain, 1, 6, ends=())
    ids, last = [], 1
    for _ in range(6):
        last = max(range(9), key=chain.table[last].__getitem__)
        ids.append(last)
    assert (output.token_ids, output.finish_reason) == (ids, "length")


async def test_least_length():
    chain = Chain(4, 1)
    outputs = await found(chain, 20, 3, min_tokens=3)
    assert [output.token_ids for output in outputs] == every(chain, 3, 1.0, least=3)[:20]


async def test_it_stops_when_nothing_can_get_better():
    chain = Chain(4, 2)
    await found(chain, 1, 500, 0.0)
    assert chain.calls < 100


async def test_logprobs_are_of_the_chosen_tokens():
    chain = Chain(6, 3)
    for output in await found(chain, 3, 4, logprobs=2):
        assert [token.token_id for token in output.logprobs] == output.token_ids
        for last, token in zip([1, *output.token_ids], output.logprobs, strict=False):
            assert token.logprob == chain.table[last][token.token_id]
            assert len(token.top_ids) == 2


async def test_fewer_than_wanted():
    with pytest.raises(GenerationFailed, match="fewer than n"):
        await found(Chain(3, 1), 9, 1)


class TestOverHttp:
    async def test_choices_are_beams(self, api):
        for stream in (False, True):
            reply = await api.chat(
                use_beam_search=True, n=2, max_tokens=3, length_penalty=0.5, temperature=0, stream=stream
            )
            assert reply.status_code == 200
        # The fake's likeliest tokens are the scripted one and those after it.
        body = ok(await api.complete(use_beam_search=True, n=2, max_tokens=1, return_token_ids=True))
        assert [choice["token_ids"] for choice in body["choices"]] == [[65], [66]]
        assert {len(add.output_token_ids) for add in api.service.adds} == {0, 1, 2}
        assert all(stream.aborted for stream in api.service.streams)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("temperature", 0.7), ("top_p", 0.5), ("stop", ["x"]), ("presence_penalty", 1), ("length_penalty", 11),
         ("prompt_logprobs", 1), ("max_tokens", 0)],
    )  # fmt: skip
    async def test_what_beams_cannot_honour(self, api, field, value):
        more = {"echo": True} if field == "max_tokens" else {}
        error = refused(await api.complete(use_beam_search=True, n=2, **{field: value}, **more))
        assert error["param"] == field
