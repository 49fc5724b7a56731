"""Compiled sampling against the reference, in every variant that this CPU can run."""

import numpy as np
import pytest
import torch

from rayllm_kernels.native.build import VARIANTS, cpu_features
from rayllm_kernels.native.library import Machine, library, load
from rayllm_kernels.sampling import REFERENCE, Draws, Penalties, SamplingOps

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")
SIZES = (1, 7, 16, 17, 63, 64, 65, 1000, 5003, *(pytest.param(n, marks=pytest.mark.slow) for n in (49152, 151936)))
INF = float("inf")


def able(name: str) -> object:
    """A variant as a parameter; all but the one in use may have to be compiled first, which takes a while."""
    return pytest.param(name, marks=() if name == usable()[0] else pytest.mark.slow)


def usable() -> list[str]:
    return [variant.name for variant in VARIANTS if variant.needs <= cpu_features()]


@pytest.fixture(scope="module", params=[able(name) for name in usable()])
def lib(request: pytest.FixtureRequest) -> object:
    return load(next(variant for variant in VARIANTS if variant.name == request.param))


@pytest.fixture(scope="module")
def native(lib: object) -> SamplingOps:
    return Machine(2, lib).sampling()


def logits(kind: str, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Random rows of some shape of distribution."""
    generator = torch.Generator().manual_seed(seed + vocab)
    normal = torch.randn(rows, vocab, generator=generator)
    if kind == "peaked":
        return normal * 2 + 12 * (torch.rand(rows, vocab, generator=generator) < 5 / vocab)
    if kind == "ties":
        return torch.randint(-4, 5, (rows, vocab), generator=generator).float()
    if kind == "flat":
        return torch.zeros(rows, vocab)
    if kind == "holes":
        normal[torch.rand(rows, vocab, generator=generator) < 0.7] = -INF
        normal[torch.rand(rows, vocab, generator=generator) < 0.1] = float("nan")
    return normal * 4


def draws(seed: int, rows: int, **fixed: float) -> Draws:
    """Every mixture of filters, unless fixed."""
    rng = np.random.default_rng(seed)

    def some(name: str, values: list[float], dtype: type) -> np.ndarray:
        return np.full(rows, fixed[name], dtype) if name in fixed else rng.choice(values, rows).astype(dtype)

    return Draws(
        some("temperature", [0, 0.01, 0.3, 0.7, 1, 1, 1, 1.5, 2, 100], np.float32),
        some("min_p", [0, 0, 0, 0.01, 0.2, 1], np.float64),
        some("top_k", [0, 0, 1, 2, 50, 900, 10**6], np.int64),
        some("top_p", [1, 1, 1e-9, 0.3, 0.9, 0.95, 0.999], np.float64), rng.integers(0, 2**64, rows, np.uint64),
    )  # fmt: skip


def part(d: Draws, rows: slice) -> Draws:
    return Draws(*(getattr(d, name)[rows] for name in Draws.__slots__ if name != "at"))


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("kind", ["normal", "peaked", "ties", "flat", "holes"])
def test_choices_are_those_of_the_reference(native: SamplingOps, kind: str, vocab: int) -> None:
    rows = 12 if vocab > 1000 else 100
    logits_RV = logits(kind, rows, vocab)
    d = draws(vocab, rows)
    assert native.choose(logits_RV, d).tolist() == REFERENCE.choose(logits_RV, d).tolist()


@pytest.mark.parametrize("vocab", SIZES)
def test_rows_are_restricted_as_by_the_reference(native: SamplingOps, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits_RV = logits("holes", 6, vocab)
    at = np.array([4, 0, 5, 2])
    bits_NW = rng.integers(-(2**31), 2**31, (4, -(-vocab // 32))).astype(np.int32)
    bits_NW[1], bits_NW[2] = -1, 0
    mine, theirs = logits_RV.clone(), logits_RV.clone()
    native.restrict(mine, at, bits_NW)
    REFERENCE.restrict(theirs, at, bits_NW)
    assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert torch.equal(mine[[0, 1, 3]].nan_to_num(7.0), logits_RV[[0, 1, 3]].nan_to_num(7.0))
    assert (mine[5] == -INF).all()
    d = draws(vocab, 6)
    for ops in (native, REFERENCE):
        assert ops.choose(mine, d.of(at)).tolist() == REFERENCE.choose(theirs, d)[at].tolist()


def test_rows_without_a_choice_or_with_infinity(native: SamplingOps) -> None:
    logits_RV = torch.full((5, 100), -INF)
    logits_RV[1] = float("nan")
    logits_RV[2, 60:] = INF
    logits_RV[3, 99] = -1e38
    logits_RV[4] = torch.linspace(-1, 1, 100) * 1e38
    for temperature in (0.0, 0.5, 100.0):
        for top_p in (0.5, 1.0):
            d = draws(1, 5, temperature=temperature, top_p=top_p)
            for ops in (native, REFERENCE):
                assert ops.choose(logits_RV, d).tolist() == [-1, -1, 60, 99, 99]


def test_a_choice_depends_on_nothing_but_its_row(lib: object) -> None:
    logits_RV = torch.cat([logits(kind, 16, 1537) for kind in ("normal", "peaked", "ties", "flat")])
    d = draws(5, 64)
    whole = Machine(1, lib).choose(logits_RV, d)
    wide = torch.full((64, 1700), INF)
    wide[:, :1537] = logits_RV
    for threads in (1, 2, 3, 4):
        machine = Machine(threads, lib)
        for rows in (*range(1, 8), 64):
            assert torch.equal(machine.choose(logits_RV[:rows], part(d, slice(rows))), whole[:rows])
        assert torch.equal(machine.choose(wide[:, :1537], d), whole), "a row of a wider array"
        for i in range(64):
            assert torch.equal(machine.choose(logits_RV[i : i + 1], part(d, slice(i, i + 1))), whole[i : i + 1])


def test_noise_prunes_nothing_that_could_win(native: SamplingOps) -> None:
    """Many keys over rows where winners are near ties, where only an exact bound passes."""
    for scale in (0.0, 0.01, 1.0, 1000.0):
        logits_RV = (logits("normal", 1, 257) * scale).expand(500, -1)
        d = draws(3, 500, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0)
        assert native.choose(logits_RV, d).tolist() == REFERENCE.choose(logits_RV, d).tolist()


def test_samples_follow_the_distribution(native: SamplingOps) -> None:
    """100,000 draws of 8 tokens: a fair sampler strays this far (chi-square above 29.9) once in 10,000 runs."""
    logits_V = torch.tensor([0.0, 0.5, 1.0, -1.0, 2.0, 0.3, -0.4, 1.5])
    d = draws(11, 100_000, temperature=0.8, min_p=0.0, top_k=0, top_p=1.0)
    wanted = torch.softmax(logits_V / 0.8, 0).numpy() * 100_000
    counts = np.bincount(native.choose(logits_V.expand(100_000, -1), d).numpy(), minlength=8)
    assert ((counts - wanted) ** 2 / wanted).sum() < 29.9


def test_samples_of_a_large_vocabulary_follow_the_distribution(native: SamplingOps) -> None:
    """As above, over sixteen ranges of ids of a flat vocabulary (chi-square of 15 above 44.3)."""
    d = draws(12, 20_000, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0)
    chosen = native.choose(torch.zeros(1, 1600).expand(20_000, -1), d).numpy()
    counts = np.bincount(chosen // 100, minlength=16)
    assert ((counts - 1250) ** 2 / 1250).sum() < 44.3


@pytest.mark.parametrize("vocab", SIZES)
def test_penalties_are_those_of_the_reference(native: SamplingOps, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    p = 20
    tokens = rng.integers(0, min(vocab, 90), (p + 4, 300)).astype(np.int32)
    prompt = rng.integers(1, 100, p)
    penalties = Penalties(
        at=np.arange(p) * 2, tokens=tokens, held=rng.permutation(p + 4)[:p], prompt=prompt,
        length=prompt + rng.integers(0, 200, p), repetition=rng.choice([1, 1.3, 0.7], p).astype(np.float32),
        frequency=rng.choice([0, 0.3, -1.7], p).astype(np.float32),
        presence=rng.choice([0, 0.4, -0.1], p).astype(np.float32),
    )  # fmt: skip
    for kind in ("normal", "ties"):
        got = logits(kind, 2 * p, vocab)
        got[:, ::3] = -INF
        wanted = got.clone()
        native.penalise(got, penalties)
        REFERENCE.penalise(wanted, penalties)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("kind", ["normal", "peaked", "ties", "flat", "holes"])
def test_log_probabilities_are_those_of_the_reference(native: SamplingOps, kind: str, vocab: int) -> None:
    logits_RV = logits(kind, 3, vocab)
    at = np.array([2, 0, 2])
    tokens = np.array([0, vocab - 1, vocab // 2])
    for count in {0, 1, min(5, vocab), *((vocab,) if vocab <= 1000 or kind == "normal" else ())}:
        got, wanted = (ops.log_probabilities(logits_RV, at, tokens, count) for ops in (native, REFERENCE))
        assert np.array_equal(got.ranks, wanted.ranks)
        assert np.array_equal(got.top_ids, wanted.top_ids)
        for mine, theirs in ((got.logprobs, wanted.logprobs), (got.top_values, wanted.top_values)):
            assert np.allclose(mine, theirs, atol=2e-6, rtol=2e-6, equal_nan=True)


def test_log_probabilities_depend_on_nothing_but_their_row(lib: object) -> None:
    logits_RV = logits("normal", 64, 1537)
    at, tokens = np.arange(64), np.arange(64)
    whole = Machine(1, lib).log_probabilities(logits_RV, at, tokens, 5)
    for threads in (2, 4):
        machine = Machine(threads, lib)
        for i in (0, 17, 63):
            one = machine.log_probabilities(logits_RV, at[i : i + 1], tokens[i : i + 1], 5)
            assert np.array_equal(one.logprobs, whole.logprobs[i : i + 1])
            assert np.array_equal(one.top_values, whole.top_values[i : i + 1])


@pytest.mark.slow
def test_choices_are_the_same_in_every_variant() -> None:
    logits_RV = torch.cat([logits(kind, 8, 49152) for kind in ("normal", "peaked", "ties", "flat", "holes")])
    d = draws(9, len(logits_RV))
    chosen = {
        name: Machine(2, load(next(v for v in VARIANTS if v.name == name))).choose(logits_RV, d).tolist()
        for name in usable()
    }
    assert all(tokens == chosen["portable"] for tokens in chosen.values())
