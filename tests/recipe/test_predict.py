"""The line on ln depth and the shrinkage, against answers worked out by hand and by scipy."""

import itertools

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.runs_frame import grid

from sparsedepth.effects.knobs import find_knobs
from sparsedepth.recipe.predict import (
    at_depth,
    between_depths,
    leverage,
    line_weights,
    predicted,
    reliability,
    scatter_of_depths,
    spread_of_effects,
)


def rows(depths, seeds, difference):
    """Paired differences of every seed at every depth; the baseline's side is 0."""
    table = [(seed, depth, difference(seed, depth)) for seed in seeds for depth in depths]
    frame = pd.DataFrame(table, columns=["seed", "n_layers", "difference"])
    return frame.assign(value=frame["difference"], value_baseline=0.0)


def test_every_seed_has_its_own_line():
    noise = np.random.default_rng(0).normal(size=(3, 3))
    frame = rows([12, 16, 24], range(3), lambda seed, depth: noise[seed, (depth - 12) // 4 % 3])
    by_seed = at_depth(frame, line_weights(frame, 48))
    for seed, of_seed in frame.groupby("seed"):
        fit = stats.linregress(np.log(of_seed["n_layers"]), of_seed["difference"])
        assert by_seed["difference"][seed] == pytest.approx(fit.intercept + fit.slope * np.log(48))
    design_32 = np.column_stack([np.ones(3), np.log([12.0, 16, 24])])
    at_2 = np.array([1.0, np.log(48)])
    assert leverage([12, 12, 16, 24], 48) == pytest.approx(at_2 @ np.linalg.inv(design_32.T @ design_32) @ at_2)


def test_one_depth_predicts_nothing():
    assert line_weights(rows([12], range(3), lambda seed, depth: 1.0), 48).empty


def test_what_lies_off_the_line_in_every_seed_is_variance_between_depths():
    """At x = -1, 0, 1 the effects +1, -2, +1 lie off every line: S sum of squares / 1 df = 6 S, so tau^2 is 6."""
    off = {1: 1.0, 10: -2.0, 100: 1.0}
    assert between_depths(rows(off, range(3), lambda seed, depth: off[depth])) == (pytest.approx(6.0), 1)
    assert between_depths(rows([1, 10], range(3), lambda seed, depth: off[depth])) == (pytest.approx(4.5), 1)
    apart = rows(off, range(3), lambda seed, depth: (seed - 1) * off[depth])  # the mean over seeds is on the line
    assert between_depths(apart) == (0.0, 1)


def test_what_seeds_scatter_by_themselves_is_no_variance_between_depths():
    """Seed s lies (1, 4, -2)_s off its line, so 1 in the mean: S sum of squares 18, and within seeds 6 (0 + 9 + 9) / 2
    = 54, is more. With (2, 3, 4)_s: 162, within 6 (1 + 0 + 1) / 2 = 6, so (162 - 6) / 3."""
    off = {1: 1.0, 10: -2.0, 100: 1.0}
    assert between_depths(rows(off, range(3), lambda seed, depth: (1, 4, -2)[seed] * off[depth])) == (0.0, 1)
    seeds = rows(off, range(3), lambda seed, depth: (2, 3, 4)[seed] * off[depth])
    assert between_depths(seeds) == (pytest.approx((162 - 6) / 3), 1)


def test_a_prediction_adds_the_scatter_at_the_new_depth_to_that_of_the_line():
    """Effects on a line but for -.01, .02, -.01 at x = ln 4, ln 16, ln 64, alike in all seeds: tau^2 is .0006, and at
    ln 256, two steps off the middle, h = 1/3 + 4/2."""
    off = {4: -0.01, 16: 0.02, 64: -0.01}
    axes = {"n_layers": [*off], "depth_scale": ["none", "lns"], "seed": range(3)}
    runs = grid(axes, lambda c: {"val_loss": 3 + (c.depth_scale == "lns") * (off[c.n_layers] + 1e-6 * c.seed)})
    (found,) = predicted(runs, find_knobs(runs), "val_loss", 256)
    assert found.extra_variances[0].variance == pytest.approx(0.0006 * (1 + 1 / 3 + 2), rel=1e-3)


def test_settings_of_three_depths_say_how_far_depths_scatter():
    """tau^2 is 6 and 0 of one degree of freedom each; a slope over two depths is no scatter beside them: alone, effects
    of +1 and -2 have 4.5. Seeds that were run at one depth each say nothing, rather than 0."""
    off = {1: 1.0, 10: -2.0, 100: 1.0}
    bent, straight = (rows(off, range(3), lambda seed, depth, k=k: k * off[depth]) for k in (1, 0))
    steep = rows([1, 10], range(3), lambda seed, depth: off[depth])
    unpaired = pd.concat(rows([depth], [seed], lambda *_: 1.0) for seed, depth in enumerate(off))
    assert between_depths(unpaired) is between_depths(rows([1], range(3), lambda *_: 1.0)) is None
    for settings, variance, df in [
        ([bent], 6.0, 1),
        ([bent, straight], 3.0, 2),
        ([bent, straight, steep, unpaired], 3.0, 2),
        ([steep, unpaired], 4.5, 1),
    ]:
        scatter = scatter_of_depths(settings)
        assert (scatter.variance, scatter.df) == (pytest.approx(variance), df)
    assert scatter_of_depths([unpaired]) is None


def test_a_slope_over_two_depths_widens_no_prediction():
    """LNS on a line through five depths, with or without weight decay 0.3 at two of them, whose effect falls by .33."""
    noise = np.random.default_rng(1)
    five = {"n_layers": [4, 8, 12, 16, 24], "depth_scale": ["none", "lns"], "seed": range(3)}
    two = {"n_layers": [8, 24], "weight_decay": [0.3], "seed": range(3)}
    runs = pd.concat([grid(axes, lambda config: {}) for axes in (five, two)], ignore_index=True)
    slope = -0.02 * (runs["depth_scale"] == "lns") - 0.3 * (runs["weight_decay"] == 0.3)
    runs["val_loss"] = 3 + slope * np.log(runs["n_layers"]) + 0.003 * noise.normal(size=len(runs))
    for each, settings in [(runs[: len(runs) - 6], 1), (runs, 2)]:
        predictions = predicted(each, find_knobs(each), "val_loss", 32)
        truth = {"depth_scale=lns": -0.02 * np.log(32), "weight_decay=0.3": -0.3 * np.log(32)}
        assert len(predictions) == settings
        for contrast in predictions:
            assert contrast.effect.mean == pytest.approx(truth[contrast.setting], abs=0.015)
            assert contrast.effect.hi - contrast.effect.lo < 0.03


@pytest.mark.parametrize("depths", [(12, 16, 24), (12, 24)])
def test_an_extrapolation_covers_effects_that_lie_off_the_line(depths):
    """Effects at 12, 16, 24 and 32 layers lie off their line with sd .02, seeds with .01: 45 intervals."""
    generator = np.random.default_rng(0)
    axes = {"n_layers": depths, "depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1, 0.3], "seed": range(3)}
    runs, hits = grid(axes, lambda config: {}), []
    knobs = find_knobs(runs)
    for _ in range(15):
        off = 0.02 * generator.normal(size=(4, 4))
        truth = dict(zip(itertools.product([12, 16, 24, 32], ["lns", 0.1, 0.3]), off[:, :3].ravel(), strict=True))
        effect = [
            truth[n, "lns"] * (scale == "lns") + truth.get((n, decay), 0.0)
            for n, scale, decay in zip(runs["n_layers"], runs["depth_scale"], runs["weight_decay"], strict=True)
        ]
        runs["val_loss"] = 3 + np.array(effect) + 0.01 * generator.normal(size=len(runs))
        keys = {"depth_scale=lns": "lns", "weight_decay=0.1": 0.1, "weight_decay=0.3": 0.3}
        hits += [c.effect.covers(truth[32, keys[c.setting]]) for c in predicted(runs, knobs, "val_loss", 32)]
    assert np.mean(hits) >= 0.85  # of 45; seeds alone give .4


def test_a_line_from_two_depths_carries_what_tuning_chose_there():
    """From 4 and 8 layers the effect at 16 is -1 and 2 times those there: 5 times the variance of one choice, for
    either side; the expected regrets of the setting, .01 and .03, leave -.01 + 2 x .03."""
    runs = grid(
        {"n_layers": [4, 8], "depth_scale": ["none", "lns"], "seed": range(3)},
        lambda config: {
            "val_loss": 3 + 0.001 * config.seed * config.n_layers * (config.depth_scale == "lns"),
            "tuned_fields": "lr",
            "tuned_by": "val_loss",
            "tuning": "best",
            "tuning_variance": 0.02,
            "tuning_df": 5.0,
            "tuned_values": None,
            "tuned_rivals": None,
            "tuning_n_seeds": 3.0,
            "tuning_excess": {4: 0.01, 8: 0.03}[config.n_layers] * (config.depth_scale == "lns"),
        },
    )
    (found,) = predicted(runs, find_knobs(runs), "val_loss", 16)
    assert [term.variance for term in found.extra_variances] == pytest.approx([5 * 0.02, 5 * 0.02])
    assert found.expected_regret == pytest.approx(0.05)


def test_spread_by_hand():
    # one setting: e^2 / (tau^2 + se^2) = 1; two equal errors: the mean of e^2 less se^2
    assert spread_of_effects([5.0], [3.0]) == pytest.approx(4.0)
    assert spread_of_effects([3.0, 1.0], [1.0, 1.0]) == pytest.approx(2.0)
    assert spread_of_effects([0.5, -0.9], [1.0, 1.0]) == 0.0
    assert spread_of_effects([2.0, 2.0], [0.0, 0.0]) == pytest.approx(2.0)
    assert spread_of_effects([0.0], [0.0]) == spread_of_effects([], []) == 0.0
    assert reliability(2.0, 1.0) == pytest.approx(0.8)
    assert reliability(0.0, 0.0) == 0.0


def test_shrunk_effects_are_nearer_the_truth_than_the_estimates():
    generator = np.random.default_rng(1)
    errors_J = generator.uniform(0.2, 2.0, size=12)
    raw = shrunk = 0.0
    for _ in range(100):
        truth_J = generator.normal(size=12)
        found_J = truth_J + errors_J * generator.normal(size=12)
        tau = spread_of_effects(found_J, errors_J)
        kept_J = [reliability(tau, error) for error in errors_J]
        raw += ((found_J - truth_J) ** 2).sum()
        shrunk += ((kept_J * found_J - truth_J) ** 2).sum()
    assert shrunk < 0.7 * raw
