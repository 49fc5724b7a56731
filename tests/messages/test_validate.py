"""Ranges of sampling parameters, as Python callers meet them."""

import pytest

from rayllm.errors import ContextTooLong, RequestError
from rayllm.messages.sampling import SamplingParams
from rayllm.messages.validate import Limits, check_ids, check_sampling, output_room

LIMITS = Limits(vocab_size=100, max_model_len=64)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", None),
        ("top_p", 0.0),
        ("min_p", 2),
        ("n", True),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", (5,)),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (1.0,)),
        ("allowed_token_ids", ()),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("min_tokens", 65),
        ("repetition_penalty", 0),
    ],
)
def test_out_of_range(field, value):
    with pytest.raises(RequestError) as caught:
        check_sampling(SamplingParams(**{field: value}), LIMITS)
    assert caught.value.param == field
    assert field in caught.value.message


def test_defaults_are_in_range():
    check_sampling(SamplingParams(), LIMITS)


def test_min_tokens_beside_max_tokens():
    check_sampling(SamplingParams(min_tokens=5, max_tokens=5), LIMITS)
    with pytest.raises(RequestError, match="min_tokens"):
        check_sampling(SamplingParams(min_tokens=6, max_tokens=5), LIMITS)


def test_unlimited_logprobs():
    limits = Limits(vocab_size=100, max_model_len=64, max_logprobs=-1)
    for value in (-1, 100):
        check_sampling(SamplingParams(logprobs=value), limits)
    with pytest.raises(RequestError):
        check_sampling(SamplingParams(logprobs=101), limits)


def test_ids():
    check_ids([], "prompt", LIMITS)
    check_ids([0, 99], "prompt", LIMITS)
    for ids in ([100], [-1], [True], ["5"], [5.0], [2**80]):
        with pytest.raises(RequestError):
            check_ids(ids, "prompt", LIMITS)


class TestOutputRoom:
    def test_wanted(self):
        assert output_room(60, 4, LIMITS) == 4
        assert output_room(64, 0, LIMITS) == 0

    def test_default(self):
        assert output_room(10, None, LIMITS) == 54
        assert output_room(10, None, LIMITS, default=16) == 16
        assert output_room(60, None, LIMITS, default=16) == 4

    def test_a_limit_of_the_server(self):
        limits = Limits(vocab_size=100, max_model_len=64, max_tokens=5)
        assert output_room(10, 40, limits) == output_room(10, None, limits) == output_room(10, None, limits, 16) == 5
        assert output_room(10, 2, limits) == 2
        assert output_room(60, None, limits) == 4

    @pytest.mark.parametrize(("length", "wanted"), [(60, 5), (64, None), (64, 1), (65, 0), (1, 2**60)])
    def test_too_long(self, length, wanted):
        with pytest.raises(ContextTooLong, match="64"):
            output_room(length, wanted, LIMITS, default=16)
