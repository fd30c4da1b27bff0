"""Student's interval against printed tables, by hand, and by simulation; Holm's correction by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsedepth.effects.intervals import (
    ExtraVariance,
    Judged,
    check_shared_baselines,
    estimate,
    holm,
    moderate,
    scatter,
    t_interval,
)
from sparsedepth.store.small_sample import t_critical, two_sided_p


@pytest.mark.parametrize(
    ("df", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (120, 1.9799)]
)
def test_critical_values_are_those_of_the_tables(df, expected):
    assert t_critical(df) == pytest.approx(expected, abs=5e-5)


def test_two_sided_p_in_closed_form():
    assert two_sided_p(1.0, 1) == pytest.approx(0.5)  # Cauchy: 1 - 2/pi atan(1)
    assert two_sided_p(2.0, 2) == pytest.approx(1 - 2 / math.sqrt(6))  # 1 - t / sqrt(t^2 + 2)
    assert two_sided_p(0.0, 7) == pytest.approx(1.0)
    assert two_sided_p(1.96, 100_000) == pytest.approx(0.05, abs=2e-4)  # the normal limit


def test_scatter_by_hand():
    """Two cells of two values, of 4 - 1 degrees of freedom, one of them of the cells' means."""
    cells = np.array(["a", "a", "b", "b"])
    # means 2 and -2: s_b^2 = 2 (4 + 4) / 1; s_w^2 = 4 / 2
    assert scatter(np.array([3.0, 1.0, -1.0, -3.0]), cells, 3, 1) == (16.0, pytest.approx(256 / (4 / 2 + 14**2)))
    assert scatter(np.array([1.0, -1.0, 1.0, -1.0]), cells, 3, 1) == (4 / 3, 3)  # no mean off: all values as one
    assert scatter(np.array([1.0, -1.0]), cells[1:3], 1, 1) == (2.0, 1)  # nothing within cells


@given(st.floats(-50, 50), st.integers(1, 60))
def test_p_is_a_symmetric_probability_that_falls_with_t(t, df):
    assert 0 <= two_sided_p(t, df) <= 1
    assert two_sided_p(t, df) == two_sided_p(-t, df)
    assert two_sided_p(abs(t) + 1, df) <= two_sided_p(t, df) + 1e-14


def test_estimate_by_hand():
    found = estimate([1.0, 2.0, 3.0])  # mean 2, s = 1, error = 1/sqrt(3), t(2) = 4.3027
    assert (found.mean, found.n) == (2.0, 3)
    assert found.hi == pytest.approx(2 + 4.30265 / math.sqrt(3), abs=1e-4)
    assert found.lo == pytest.approx(2 - 4.30265 / math.sqrt(3), abs=1e-4)
    t = 2 * math.sqrt(3)
    assert found.p == pytest.approx(1 - t / math.sqrt(t * t + 2))
    assert not found.excludes_zero


def test_fewer_than_three_values_have_no_interval():
    assert estimate([]).mean is None
    two = estimate([1.0, 1.2])
    assert two.mean == pytest.approx(1.1)
    assert (two.lo, two.hi, two.p) == (None, None, None)
    assert not two.excludes_zero


def test_agreement_by_rounding_is_not_certainty():
    """Three seeds, each one layer of 16 more useful: without the floor there is no interval."""
    assert estimate([1 / 16] * 3).lacks_spread
    assert not estimate([1 / 16] * 3, least_sd=1 / 16 / math.sqrt(6)).excludes_zero


def test_effects_that_agree_in_every_seed_lend_no_certainty():
    """All blocks of a shallow model are needed in every run: that narrows no interval of a deep one. When three such
    effects lent their variance of 0 to three others, .81 of two seeds' intervals covered the truth, .90 of three's."""

    def counted(*by_seed):
        return Judged(effect=estimate(by_seed), unit="layer", by_seed=by_seed, noise=np.std(by_seed), floor=0.0)

    deep = [counted(-8.0, -7.0), counted(-4.0, -5.0), counted(-9.0, -12.0, -7.0, -8.0, -6.0, -11.0, -9.0)]
    shallow = [counted(0.0, 0.0), counted(-1.0, -1.0), counted(0.1 + 0.2 - 1.3, -1.0)]
    assert moderate([*deep, *shallow]) == [*moderate(deep), *shallow]
    assert moderate(deep, lenders=shallow) == moderate(deep)
    assert moderate(deep)[0].effect.lo is not None


def test_the_interval_covers_the_truth_in_95_percent():
    """2000 draws at each n: the share has a standard deviation of 0.5%; the tolerance is three of them."""
    generator = np.random.default_rng(0)
    for n in (3, 5, 12):
        draws = 0.02 + 0.01 * generator.normal(size=(2000, n))
        assert np.mean([estimate(draw).covers(0.02) for draw in draws]) == pytest.approx(0.95, abs=0.015)


def test_holm_by_hand():
    # sorted: .01 x 4, .02 x 3, .03 x 2, .9 x 1, made monotone: .04, .06, .06, .9
    assert holm([0.03, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([0.03, None, 0.01]) == pytest.approx([0.03, None, 0.02])
    assert holm([]) == []
    assert holm([0.7, 0.6]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(p_values):
    adjusted = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    assert [adjusted[i] for i in order] == sorted(adjusted)


def against_one_baseline(means, chosen_badly=0.1**2):
    """Effects of error .12 or so against a baseline whose choice adds this variance."""
    shared = (ExtraVariance(variance=chosen_badly, df=20, baseline=("cell",)),)
    error = math.sqrt(chosen_badly + 0.05**2)
    effects = [t_interval(mean, error, 30, 6) for mean in means]
    return [
        Judged(
            effect=effect,
            unit="nat/token",
            by_seed=(),
            floor=0.05,
            p_holm=effect.p,
            extra_variances=shared,
            expected_regret=0.0,
        )
        for effect in effects
    ]


def doubted(family, knobs=None):
    return check_shared_baselines(family, knobs or [str(i) for i in range(len(family))])


def test_a_baseline_that_all_settings_lie_below_is_in_doubt():
    """Of -.3 as the median of five the choice explains .01 / (.01 + pi .0025 / 10), nearly all; of an effect of -.4
    among four of 0 nothing; and two contrasts tell nothing of their baseline."""
    together = doubted(against_one_baseline([-0.3, -0.31, -0.3, -0.29, -0.3]))
    assert {judged.verdict for judged in together} == {"not distinguishable"}
    assert together[0].expected_regret == pytest.approx(-0.3 * 0.01 / (0.01 + math.pi * 0.0025 / 10))
    assert together[0].verdict_blocked_by.startswith("the 5 settings differ from this baseline by -0.3 (median)")
    alone = doubted(against_one_baseline([-0.4, 0.0, 0.01, -0.01, 0.0]))
    assert [judged.verdict for judged in alone] == ["lower"] + ["not distinguishable"] * 4
    assert {judged.verdict for judged in doubted(against_one_baseline([-0.3, -0.31]))} == {"lower"}
    sure = doubted(against_one_baseline([-0.3, -0.31, -0.3], chosen_badly=1e-6))
    assert {judged.verdict for judged in sure} == {"lower"}
    depths = doubted(against_one_baseline([-0.3, -0.31, -0.3, -0.29]), ["n_layers"] * 4)
    assert {judged.verdict for judged in depths} == {"lower"}, "settings of one knob tell nothing of their baseline"
