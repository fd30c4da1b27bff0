"""Contexts of equal weight, whatever their number of seeds; the seed as the unit."""

import math

import numpy as np
import pandas as pd
import pytest

from sparsedepth.effects.intervals import estimate
from sparsedepth.effects.seed_means import seed_means


def reduced(rows):
    """Rows of (context, seed, value)."""
    frame = pd.DataFrame(rows, columns=["context", "seed", "difference"])
    return seed_means(frame[["difference"]], frame["seed"], frame["context"]), frame["difference"]


def test_contexts_with_the_same_seeds_are_averaged_by_seed():
    means, values = reduced([("a", 0, 1.0), ("b", 0, 3.0), ("a", 1, 2.0), ("b", 1, 6.0)])
    assert means.by_seed["difference"].tolist() == [2.0, 4.0] and means.df == 1
    assert (means.weights * values).sum() == pytest.approx(3.0)


def test_a_context_with_fewer_seeds_weighs_as_much():
    """Means 2 over seeds 0 to 2 and 10 over seeds 0 and 1. Residuals (-1, 0, 1) sqrt(3/2) / 6 and (-1, 1) sqrt(2) / 4:
    their sums by seed, squared, are the variance of the mean."""
    means, values = reduced([("a", 0, 1.0), ("a", 1, 2.0), ("a", 2, 3.0), ("b", 0, 9.0), ("b", 1, 11.0)])
    row_S = means.by_seed["difference"].to_numpy()
    a, b = math.sqrt(3 / 2) / 6, math.sqrt(2) / 4
    assert row_S.mean() == pytest.approx(6.0) == (means.weights * values).sum()
    assert row_S.var(ddof=1) / 3 == pytest.approx((-a - b) ** 2 + b**2 + a**2)
    assert means.df == 2  # (1/3 + 1/2)^2 / (1/(9 * 2) + 1/(4 * 1)) = 2.3 is more than three seeds have
    assert means.weights.tolist() == pytest.approx([1 / 6] * 3 + [1 / 4] * 2)


def test_a_context_of_one_seed_shows_no_noise():
    means, values = reduced([("a", 0, 1.0), ("a", 1, 2.0), ("b", 2, 9.0)])
    assert means.by_seed["difference"].tolist() == [1.0, 2.0, 9.0] and means.df == 2
    assert (means.weights * values).sum() == pytest.approx(4.0)


def test_pairs_of_one_context_and_seed_count_together():
    means, values = reduced([("a", 0, 0.0), ("a", 0, 2.0), ("a", 1, 2.0), ("a", 2, 3.0), ("b", 0, 9.0), ("b", 1, 11.0)])
    assert means.by_seed["difference"].mean() == pytest.approx(6.0) == (means.weights * values).sum()


@pytest.mark.parametrize("shared", [0.0, 0.7])
def test_intervals_of_uneven_designs_cover(shared):
    """Effects -1 and +1 in contexts of 16 and 6 seeds: their mean is 0, that over pairs or seeds is not. 1,000 sweeps,
    also where a seed shifts both contexts: 95% -+ 2% (three standard deviations)."""
    generator, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        seed_S = shared * generator.normal(size=16)
        own_CS = math.sqrt(1 - shared**2) * generator.normal(size=(2, 16))
        rows = [("a", s, -1 + seed_S[s] + own_CS[0, s]) for s in range(16)]
        rows += [("b", s, 1 + seed_S[s] + own_CS[1, s]) for s in range(6)]
        means, _ = reduced(rows)
        assert means.df == pytest.approx((1 / 16 + 1 / 6) ** 2 / (1 / (16**2 * 15) + 1 / (6**2 * 5)))
        covered += estimate(means.by_seed["difference"].to_numpy(), df=means.df).covers(0.0)
    assert 930 <= covered <= 970
