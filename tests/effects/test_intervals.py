"""Student's interval against printed tables, by hand, and by simulation; Holm's correction by hand."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsedepth.effects.intervals import (
    ExtraVariance,
    Judged,
    check_shared_baselines,
    correct,
    estimate,
    holm,
    moderate,
    moderate_by_depth,
    scatter,
    t_interval,
    with_extra_variances,
)
from sparsedepth.effects.moderated import SHARED, shared_correlation, squeeze
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


def judged(*by_seed, **fields):
    """An effect of these seeds, the noise of its sides included."""
    common = {"effect": estimate(by_seed, fields.get("least_sd", 0.0)), "unit": "nat/token", "by_seed": by_seed}
    return Judged(**{**common, "noise": float(np.std(by_seed, ddof=1)), "floor": 0.0, **fields})


def test_a_single_effect_keeps_its_own_error_and_the_floor_of_two_sides():
    """s = .1 of 3 seeds with 2 df; the noise of two sides has 4: t(4) = 2.77645."""
    (alone,) = moderate([judged(0.0, 0.1, 0.2)])
    assert (alone.effect.error, alone.effect.df) == (pytest.approx(0.1 / math.sqrt(3)), 2)
    assert alone.floor == pytest.approx(2.77645 * 0.1 * math.sqrt(2 / 3), rel=1e-5)


def test_seeds_that_agree_beyond_rounding_lend_the_variance_of_rounding():
    """Effects that differ by .001 between seeds, of a count whose rounding has a deviation of .1, lend as if by .1."""
    other = judged(0.3, 0.1, 0.6)
    near, by_rounding = judged(0.0, 0.001, -0.001, least_sd=0.1), judged(0.0, 0.1, -0.1)
    ours, expected = (moderate([one, other])[1].effect for one in (near, by_rounding))
    assert (ours.lo, ours.hi, ours.df) == pytest.approx((expected.lo, expected.hi, expected.df), rel=1e-9)


def test_no_borrowing_makes_an_error_smaller_than_that_of_rounding():
    counts = [judged(0.0, 0.1, -0.1, least_sd=0.1), judged(0.0, 1e-3, -1e-3), judged(2e-3, 1e-3, 0.0)]
    assert moderate(counts)[0].effect.error >= 0.1 / math.sqrt(3)
    assert moderate([judged(0.0, 0.1, -0.1), *counts[1:]])[0].effect.error < 0.1 / math.sqrt(3)


def test_two_seeds_get_an_interval_only_if_what_they_borrow_makes_up_for_the_third():
    few = judged(0.0, 0.1)
    assert moderate([few])[0].effect.lo is None
    assert moderate([few, judged(0.2, 0.3, 0.1, 0.2), judged(0.0, -0.1, 0.1, 0.1)])[0].effect.df >= 2


def test_what_choosing_a_value_adds_stays_in_a_moderated_error():
    """Error .1 / sqrt 3 with 2 df, and a variance of .01 with as many."""
    (found,) = moderate([judged(0.0, 0.1, 0.2, extra_variances=(ExtraVariance(variance=0.01, df=2),))])
    assert found.effect.error == pytest.approx(math.sqrt(0.01 / 3 + 0.01))


def test_no_depth_borrows_from_another():
    @dataclass(frozen=True, kw_only=True)
    class AtDepth(Judged):
        depth: int

        @property
        def noise_depth(self):
            return self.depth

    def at(depth, *by_seed):
        return AtDepth(**vars(judged(*by_seed)), depth=depth)

    deep, shallow = [at(24, 0.0, 0.3, 0.1), at(24, 0.2, 0.1, 0.5)], [at(4, 0.0, 0.01, 0.02), at(4, 0.01, 0.03, 0.02)]
    apart = [*moderate(deep), *moderate(shallow)]
    assert moderate_by_depth([*deep, *shallow]) == apart
    assert moderate_by_depth(deep, lenders=shallow) == moderate(deep)
    assert moderate_by_depth(deep[:1], lenders=[*deep[1:], *shallow]) == moderate(deep)[:1]


def test_a_further_variance_never_narrows_an_interval():
    """1 with 2 df and .1 with 100: Satterthwaite's 1.21 / (.5 + .0001) = 2.4 df would give t = 3.65 and a half-width of
    3.8, less than the 4.3 without; so the 2 df stay."""
    without = t_interval(0.1, 1.0, 2, 3)
    found = with_extra_variances(without, [ExtraVariance(variance=0.1, df=100)])
    assert found.hi == pytest.approx(0.1 + 4.30265 * math.sqrt(1.1), abs=1e-4) and found.hi > without.hi
    much = with_extra_variances(without, [ExtraVariance(variance=3.0, df=4)])
    assert (much.error, much.df) == (2.0, pytest.approx(16 / (1 / 2 + 9 / 4)))


def test_an_effect_without_its_expected_regret_is_corrected_as_often():
    """Of four effects one of -.3, three errors from 0: p is .0054 x 4. Without a regret of -.08 it is 2.2 errors from
    0, p .036: enough for one effect, not for four. Without one of -.01 it remains."""
    effect = t_interval(-0.3, 0.1, 30, 3)
    family = {"effect": effect, "unit": "nat/token", "by_seed": (), "floor": 0.0, "tuning_ambiguity": "in doubt"}
    of_four = {"p_holm": 4 * effect.p, "n_tested": 4}
    assert Judged(**family, **of_four, expected_regret=-0.08).verdict_blocked_by == "in doubt"
    assert Judged(**family, **of_four, expected_regret=-0.01).verdict == "lower"
    assert Judged(**family, p_holm=effect.p, expected_regret=-0.08).verdict == "lower"


def test_what_is_detected_has_to_pass_holms_first_step():
    """.05 over two sides and five effects: t(30, .995) = 2.75; and in 80% of sweeps t(30, .8) = .854 more."""
    found = Judged(effect=t_interval(0.0, 0.1, 30, 3), unit="nat/token", by_seed=(), floor=0.0, n_tested=5)
    assert found.threshold == pytest.approx(0.275, abs=1e-4)
    assert found.detectable == pytest.approx(0.275 + 0.0854, abs=1e-4)
    assert replace(found, floor=0.5).detectable == pytest.approx(0.5 + 0.0854, abs=1e-4)


def test_effects_without_a_p_value_are_not_tested():
    few, sure = judged(0.0, 0.1), judged(0.3, 0.31, 0.32)
    (_, corrected) = correct([few, sure])
    assert (corrected.n_tested, corrected.p_holm) == (1, sure.effect.p)


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


def test_what_the_median_leaves_of_its_own_regret_is_the_baselines():
    """Four of -.3 and one of -.1: the median is -.3, of a variance of .008 among them. And of -.3, of which .2 is the
    expected regret already, -.1 is left to explain."""
    family = doubted(against_one_baseline([-0.3, -0.3, -0.3, -0.3, -0.1]))
    assert family[0].expected_regret == pytest.approx(-0.3 * 0.01 / (0.01 + math.pi * 0.008 / 10))
    known = [replace(each, expected_regret=-0.2) for each in against_one_baseline([-0.3, -0.31, -0.3, -0.29, -0.3])]
    assert doubted(known)[0].expected_regret == pytest.approx(-0.2 - 0.1 * 0.01 / (0.01 + math.pi * 0.0025 / 10))


def test_correlations_of_seeds_count_beyond_chance():
    """Of three seeds r^2 is 1/2 by chance: (.75 - .5) / .5. Of two it is not known."""
    assert shared_correlation([[1.0, -1.0, 0.0], [2.0, -1.0, -1.0]]) == pytest.approx(0.5)
    assert shared_correlation([[1.0, -1.0, 0.0], [1.0, 1.0, -2.0]]) == 0.0
    assert shared_correlation([[1.0, -1.0, 0.0], [3.0, -3.0, 0.0]]) == pytest.approx(1.0)
    assert shared_correlation([[1.0, 2.0], [5.0, 3.0]]) == SHARED


def test_contrasts_that_share_their_noise_lend_less():
    variances, dfs = [1.0, 1.2, 0.9, 1.1], [2.0] * 4
    (_, apart), (_, together) = (squeeze(variances, dfs, shared) for shared in (0.0, 1.0))
    assert (apart > together).all() and (together > 2).all()


def test_no_variance_is_known_less_well_for_its_loan():
    """The smallest of .01, 1 and 100 has nothing to gain from the others."""
    assert squeeze([0.01, 1.0, 100.0], [2.0] * 3)[1].min() == 2.0


def test_agreement_by_chance_is_not_certainty():
    """A variance far below the others' median counts as 1e-5 of it."""
    for found, expected in zip(
        squeeze([1e-20, 1.0, 1.0], [2.0] * 3), squeeze([1e-5, 1.0, 1.0], [2.0] * 3), strict=True
    ):
        np.testing.assert_allclose(found, expected)
