"""Curves of a tuned value: a parabola by hand, roughness that was planted, and what choosing adds."""

import math
from dataclasses import replace

import numpy as np
import pytest

from sparsedepth.effects.intervals import ExtraVariance, t_interval, with_extra_variances
from sparsedepth.store.tuning_curve import TuningCurve, _seed_noise, curve_shapes

STEP = math.log(2)


def curve(losses, chosen, first=0):
    """Losses by value (one seed), or by value and seed; values a factor of 2 apart."""
    table = np.array(losses, dtype=float).reshape(len(losses), -1)
    return TuningCurve(values=STEP * (first + np.arange(len(table))), losses=table, chosen=chosen)


def test_a_parabola_gives_its_lowest_point_and_no_variance():
    """3 + .1 (i - 1.25)^2 at i = 0, 1, 2, 3: the optimum lies a quarter of a step above the chosen value."""
    (found,) = curve_shapes([curve([3 + 0.1 * (i - 1.25) ** 2 for i in range(4)], chosen=1)])
    assert found.optimum == pytest.approx(1.25 * STEP) and found.half_width == pytest.approx(0.0, abs=1e-6)
    assert found.variance == pytest.approx(0.0, abs=1e-12)


def test_curves_of_three_values_share_their_bend():
    """Two parabolas of one bend: what their three values leave over is nothing, so the optima are known."""
    low, high = ([0.2 * (i - at) ** 2 for i in range(3)] for at in (0.75, 1.5))
    first, second = curve_shapes([curve(low, chosen=1), curve(high, chosen=1)])
    assert first.optimum == pytest.approx(0.75 * STEP) and second.optimum == pytest.approx(1.5 * STEP)


def test_one_curve_of_three_values_tells_nothing():
    (found,) = curve_shapes([curve([3.0, 2.0, 2.5], chosen=1)])
    assert found.variance is None and found.optimum is None


def test_a_curve_that_does_not_bend_upwards_has_no_optimum():
    found = curve_shapes([curve([2.0, 2.1, 2.15, 2.18, 2.2], chosen=0), curve([2.0, 2.11, 2.15, 2.18, 2.2], chosen=0)])
    assert found[0].optimum is None and found[0].variance == pytest.approx(0.0, abs=1e-3)


def test_values_that_diverged_or_lie_far_are_left_out():
    """Beyond two steps the loss is a cliff, and the last value diverged."""
    near = [3 + 0.1 * (i - 1.25) ** 2 for i in range(4)]
    (found,) = curve_shapes([curve([*near, 50.0, math.inf], chosen=1)])
    assert found.optimum == pytest.approx(1.25 * STEP)


@pytest.mark.parametrize("rough", [0.0, 0.05])
def test_roughness_is_told_from_seeds(rough):
    """Over 40 curves of five values and three seeds: the variance is below that of the roughness, since the lowest is
    chosen, and next to nothing where only seeds vary."""
    rng = np.random.default_rng(5)
    curves = []
    for _ in range(40):
        smooth_K = 0.05 * (np.arange(5) - 2 - rng.uniform(-0.5, 0.5)) ** 2 + rough * rng.standard_normal(5)
        seen_KS = smooth_K[:, None] + 0.03 * rng.standard_normal((5, 3)) + 0.05 * rng.standard_normal(3)
        curves.append(curve(seen_KS, chosen=int(seen_KS.mean(axis=1).argmin())))
    deviations = [math.sqrt(found.variance or 0.0) for found in curve_shapes(curves)]
    assert 0.6 * rough <= np.mean(deviations) <= 0.9 * rough + 0.015


def test_a_variance_that_is_added_never_makes_an_effect_surer():
    own = t_interval(-0.3, 0.05, 2, 3)
    summed = with_extra_variances(
        own, [ExtraVariance(variance=0.05**2, df=50)]
    )  # Satterthwaite's df 7.7: the interval would be narrower
    assert summed.error == pytest.approx(0.05 * 2**0.5) and summed.df == 2
    assert summed.lo < own.lo < own.hi < summed.hi and summed.p > own.p
    wide = with_extra_variances(own, [ExtraVariance(variance=1.0, df=2)])
    assert wide.df == pytest.approx((0.0025 + 1) ** 2 / (0.0025**2 / 2 + 1 / 2))


def test_the_excess_of_a_value_is_its_height_above_the_lowest_point():
    """.1 (i - 1.25)^2: the chosen 1 lies .1 / 16 above it; as high in all curves, it makes no difference to any."""
    losses = [3 + 0.1 * (i - 1.25) ** 2 for i in range(4)]
    for shape in curve_shapes([curve(losses, chosen=1), curve(losses, chosen=1)]):
        assert shape.expected_regret == pytest.approx(0.1 / 16, abs=1e-4) and shape.variance == pytest.approx(
            0.0, abs=1e-6
        )
        assert shape.indistinguishable_values == ()


def test_seeds_that_had_no_part_in_a_choice_show_what_it_is_worth():
    """Four parabolas whose best is 1, with seeds that scatter by .1: two of these chose 2 for the first, all the same.
    Ten fresh seeds there find it .2 higher; the same ten losses as expected leave it as it was chosen."""
    rng = np.random.default_rng(1)
    smooth_K = 0.1 * (np.arange(4) - 1.0) ** 2
    others = [curve(smooth_K[:, None] + 0.1 * rng.standard_normal((4, 2)), chosen=1) for _ in range(5)]
    seen_KS = smooth_K[:, None] + np.array([[0.05, -0.05], [0.1, 0.0], [-0.12, -0.06], [0.0, 0.02]])
    excess, rivals = {}, {}
    for height in (0.0, 0.2):
        fresh_KF = np.full((4, 10), np.nan)
        fresh_KF[2] = height + 0.1 * np.linspace(-1, 1, 10)
        tuned = TuningCurve(values=STEP * np.arange(4), losses=seen_KS, chosen=2, fresh=fresh_KF)
        shape, *_ = curve_shapes([tuned, *others])
        excess[height], rivals[height] = shape.expected_regret, shape.indistinguishable_values
    assert excess[0.2] > excess[0.0] + 0.05 and pytest.approx(STEP) in rivals[0.2]


def test_what_a_seed_does_to_all_curves_alike_is_no_roughness():
    """Eight smooth curves; the seeds that chose lie 5 apart, and the others up to 5 above them, in every curve."""
    rng = np.random.default_rng(3)
    plain, shifted = [], []
    for _ in range(8):
        smooth_K = 0.1 * (np.arange(4) - 1.5 + rng.uniform(-0.5, 0.5)) ** 2
        seen_KS = smooth_K[:, None] + 0.14 * rng.standard_normal((4, 8))
        chosen = int(seen_KS[:, :2].mean(axis=1).argmin())
        fresh_KF = np.where(np.arange(4)[:, None] == chosen, seen_KS[:, 2:], np.nan)
        tuned = replace(curve(seen_KS[:, :2], chosen=chosen), fresh=fresh_KF)
        plain.append(tuned)
        shifted.append(replace(tuned, losses=tuned.losses + np.array([0.0, 5.0]), fresh=fresh_KF + np.arange(6)))
    added, as_well = (np.mean([shape.variance for shape in curve_shapes(curves)]) for curves in (plain, shifted))
    assert as_well < 1.5 * added + 0.02**2


def test_the_noise_of_seeds_and_of_runs_by_hand():
    """Means of values 1, 1 and 4, of seeds 1 and 3: residuals 0, 0, 1, -1, -1, 1 of 2 df. The seeds' effects -1 and 1
    have squares of 2, of which noise explains 2 / 3."""
    assert _seed_noise([curve([[0, 2], [1, 1], [2, 6]], chosen=1)]) == (2.0, 2, pytest.approx(4 / 3))


def test_a_regret_that_not_all_curves_have_is_variance():
    """.1 / 16 and 0 lie .1 / 32 off their mean: that squared, times n / (n - 1) = 2."""
    above, at = ([3 + 0.1 * (i - best) ** 2 for i in range(4)] for best in (1.25, 1.0))
    for shape in curve_shapes([curve(above, chosen=1), curve(at, chosen=1)]):
        assert shape.variance == pytest.approx(2 * (0.1 / 32) ** 2, rel=1e-3)


def test_an_optimum_that_is_not_known_within_a_factor_of_ten_is_none():
    """A rough curve that bends upwards, and a tenth as rough."""
    smooth, rough = np.array([0.04, 0.01, 0.0, 0.01, 0.04]), np.array([0.0, -0.1, 0.0, -0.08, 0.03])
    unsure, sure = (curve_shapes([curve(3 + smooth + share * rough, chosen=1)] * 2)[0] for share in (1.0, 0.1))
    assert (unsure.optimum, unsure.half_width) == (None, None)
    assert sure.optimum is not None and 0 < sure.half_width < math.log(10)
