"""The percentile bootstrap: known intervals, missing values, determinism."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.handmade_models import known, rng

from sparsedepth.measure.bootstrap import N_RESAMPLES, bootstrap, bootstrap_each, complete_mean, expanded_tail, finite


def mean(values_R):
    return values_R


def test_the_interval_of_a_mean_is_the_normal_one():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = bootstrap(mean, values, rng=rng())
    half = 1.96 * values.std() / math.sqrt(400)  # about 0.2; at 90% it would be 0.16
    assert found.value == pytest.approx(values.mean(), abs=1e-12)
    assert found.lo == pytest.approx(values.mean() - half, abs=0.015)
    assert found.hi == pytest.approx(values.mean() + half, abs=0.015)


@pytest.mark.parametrize(
    ("n_sequences", "draw", "truth", "least"),
    [
        (8, lambda draws, shape: draws.normal(1, 1, shape), 1, 0.925),  # without expansion .88
        (16, lambda draws, shape: draws.normal(1, 1, shape), 1, 0.935),  # .92
        (16, lambda draws, shape: draws.lognormal(0, 0.5, shape), math.exp(1 / 8), 0.92),  # .90
    ],
)
def test_few_sequences_hold_the_truth_as_often_as_the_interval_says(n_sequences, draw, truth, least):
    covered = []
    for seed in range(20):
        worlds_NE = draw(rng(seed), (n_sequences, 200))
        found = bootstrap_each(lambda means_RE: means_RE, worlds_NE, rng=rng(seed))
        covered += [known(each.lo) <= truth <= known(each.hi) for each in found]
    assert least < np.mean(covered) < 0.965


def test_the_expanded_tails_are_those_of_students_interval():
    assert expanded_tail(8) == pytest.approx(0.0057, abs=1e-4)  # Phi(-sqrt(8 / 7) 2.3646)
    assert expanded_tail(10_000) == pytest.approx(0.025, abs=1e-4)


def test_a_ratio_of_means_is_resampled_as_a_ratio():
    parts = np.random.default_rng(2).uniform(1, 2, 50)
    found = bootstrap(lambda a_R, b_R: a_R / b_R, 3 * parts, parts, rng=rng())
    assert (found.value, found.lo, found.hi) == pytest.approx((3.0, 3.0, 3.0), abs=1e-12)


def test_what_is_undefined_is_missing():
    one = bootstrap(mean, np.array([2.0]), rng=rng())
    assert (one.value, one.lo, one.hi) == (2.0, None, None)
    undefined = bootstrap(mean, np.array([1.0, math.nan]), rng=rng())
    assert (undefined.value, undefined.lo, undefined.hi) == (None, None, None)
    assert finite(math.inf) is None and finite(0.0) == 0.0
    with pytest.raises(ValueError, match="0 sequences"):
        bootstrap(mean, np.empty(0), rng=rng())


def test_the_interval_holds_the_value_where_every_resample_exceeds_it():
    noise = np.random.default_rng(3).normal(size=(8, 50))
    centred = noise - noise.mean(0)  # 50 means that are 0, and that in no resample are
    found = bootstrap(lambda means_RK: np.abs(means_RK).mean(-1), centred, rng=rng())
    assert known(found.value) == pytest.approx(0, abs=1e-12)
    assert found.lo == found.value and known(found.hi) > 0.2


@settings(max_examples=30)
@given(values=st.lists(st.floats(-100, 100), min_size=2, max_size=20), seed=st.integers(0, 99))
def test_the_interval_lies_within_the_data_around_the_value_and_repeats(values, seed):
    array = np.array(values)
    found = bootstrap(mean, array, rng=rng(seed))
    assert found == bootstrap(mean, array, rng=rng(seed))
    assert array.min() - 1e-9 <= known(found.lo) <= known(found.value) <= known(found.hi) <= array.max() + 1e-9


@pytest.mark.parametrize("drawn_before", [False, True])
def test_kept_resamples_are_those_that_the_generator_draws(drawn_before):
    """Asked again, or after another number of sequences, the generator ends where its own draws leave it."""
    values = rng(1).normal(size=7)
    for _ in range(2):
        ours, own = rng(5), rng(5)
        if drawn_before:
            assert ours.choice(9, 3).tolist() == own.choice(9, 3).tolist()
        for n in (7, 7, 4):
            tail = expanded_tail(n)
            means_R = own.multinomial(n, [1 / n] * n, N_RESAMPLES) @ values[:n] / n
            found = bootstrap(mean, values[:n], rng=ours)
            assert [found.lo, found.hi] == pytest.approx(np.quantile(means_R, [tail, 1 - tail]), rel=1e-12)
        assert ours.integers(100, size=5).tolist() == own.integers(100, size=5).tolist()


def test_a_mean_with_a_missing_value_is_missing():
    """Of the others it would be another quantity: a run that diverged is not left out of its configuration."""
    assert complete_mean([1.0, 2.0, 6.0]) == 3.0
    assert complete_mean([1.0, None]) is complete_mean([]) is None
