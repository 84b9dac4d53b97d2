"""The fit: against known links, noise, and a least-squares solver of others."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib import comm
from course_lib.comm import AlphaBeta
from course_lib.errors import CourseError
from course_lib.specs import Collective

SIZES = [2**power for power in (12, 16, 18, 20, 22, 24)]


def collectives(kind="all_reduce", ranks=4):
    return [Collective(kind, size // 4, 4, ranks) for size in SIZES]


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7), st.integers(2, 16))
def test_exact_samples_give_back_the_link(alpha, beta, ranks):
    link = AlphaBeta(alpha, beta)
    fitted = comm.fit((each, comm.seconds(each, link)) for each in collectives(ranks=ranks))
    for each in collectives(ranks=ranks):
        assert fitted.seconds(each) == pytest.approx(link.seconds(each), rel=1e-6)


def test_kinds_and_algorithms_may_be_mixed_as_steps_tell_them_apart():
    link = AlphaBeta(1e-5, 1e-9)
    samples = [(each, link.seconds(each)) for each in collectives("all_gather", 3)]
    samples += [(each, link.seconds(each)) for each in collectives("all_reduce", 8)]
    fitted = comm.fit(samples)
    assert (fitted.alpha, fitted.beta) == (pytest.approx(1e-5), pytest.approx(1e-9))
    trees = [(each, link.seconds(each, "tree")) for each in collectives()]
    assert comm.fit(trees, "tree").alpha == pytest.approx(1e-5)


@given(st.integers(0, 10**6))
def test_the_least_relative_squares_as_numpy_finds_them(seed):
    np = pytest.importorskip("numpy")
    noise, link = random.Random(seed), AlphaBeta(1e-4, 1e-9)
    samples = [(c, link.seconds(c) * noise.uniform(0.8, 1.25)) for c in collectives()]
    rows = np.array([[c.steps / t, c.bytes_per_rank / t] for c, t in samples])
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    fitted = comm.fit(samples)
    assert (fitted.alpha, fitted.beta) == (pytest.approx(alpha), pytest.approx(beta))


def test_every_sample_weighs_the_same():
    """One of six is 50% off: small or large, the fit stays within a few per cent of the others."""
    link = AlphaBeta(1e-4, 1e-9)
    for wrong in range(len(SIZES)):
        samples = [
            (each, link.seconds(each) * (1.5 if index == wrong else 1))
            for index, each in enumerate(collectives())
        ]
        fitted = comm.fit(samples)
        errors = sorted(abs(fitted.seconds(each) / link.seconds(each) - 1) for each, _ in samples)
        assert errors[2] < 0.13


@pytest.mark.parametrize("falling", [True, False])
def test_neither_is_below_zero(falling):
    """Times that fall with size, or that grow faster than any line through the origin."""
    small, large = collectives()[0], collectives()[-1]
    seconds = (2e-3, 1e-3) if falling else (1e-9, 1e-3)
    fitted = comm.fit(zip((small, large), seconds, strict=True))
    zero, other = (fitted.beta, fitted.alpha) if falling else (fitted.alpha, fitted.beta)
    assert zero == 0 < other


def test_what_is_left_when_one_is_zero_is_its_own_least_squares():
    small, large = collectives()[0], collectives()[-1]
    fitted = comm.fit([(small, 2.0), (large, 1.0)])
    ways = [6 / 2.0, 6 / 1.0]  # steps / seconds
    assert fitted.alpha == pytest.approx(sum(ways) / sum(x * x for x in ways))


EACH = Collective("all_reduce", 1000, 4, 4)


@pytest.mark.parametrize(
    "samples, told",
    [
        ([], "These 0 samples cannot tell alpha from beta"),
        ([(EACH, 1.0)], "These 1 samples"),
        ([(EACH, 1.0), (EACH, 1.1), (EACH, 0.9)], "give at least two sizes"),
        ([(Collective("all_reduce", n, 4, 1), 1.0) for n in (1, 10**6)], "of two ranks or more"),
        ([(Collective("all_reduce", n, 1, 4), 1.0) for n in (10**6, 10**6 + 4)], "far apart"),
        ([(EACH, 0.0), (EACH, 1.0)], "A sample took 0.0 seconds"),
    ],
)
def test_samples_that_cannot_do(samples, told):
    with pytest.raises(CourseError, match=told):
        comm.fit(samples)
