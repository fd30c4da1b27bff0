"""Depth slopes by setting, worked out by hand, and at their nominal error rates."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from support.runs_frame import grid, knob_of

from sparsedepth.effects.depth_slope import depth_slope, depth_slopes, exponent_text, slope_sentence

LOSS = {
    # (n_kv_heads, seed): val_loss at 4, 8 and 16 layers
    (4, 0): (3.00, 2.90, 2.80),
    (4, 1): (3.02, 2.92, 2.82),
    (4, 2): (3.04, 2.94, 2.84),
    (1, 0): (3.10, 2.99, 2.88),
    (1, 1): (3.12, 3.00, 2.88),
    (1, 2): (3.14, 3.01, 2.88),
}


def by_hand():
    axes = {"n_layers": [4, 8, 16], "n_kv_heads": [4, 1], "seed": [0, 1, 2]}
    return grid(
        axes, lambda config: {"val_loss": LOSS[config.n_kv_heads, config.seed][(4, 8, 16).index(config.n_layers)]}
    )


def test_lines_that_agree_on_no_basis_are_no_pair():
    """As in the table of effects: another task with other tokens, sizes and FLOPs says nothing about the knob."""
    runs = by_hand()
    other = runs["n_kv_heads"] == 1
    apart = runs.copy()
    bases = ["tokens_trained", "params_total", "params_active", "train_flops"]
    apart.loc[other, bases] = 2 * apart.loc[other, bases]
    assert depth_slopes(apart, knob_of(runs, "n_kv_heads")) == []
    assert depth_slopes(apart.assign(tokens_trained=1000), knob_of(runs, "n_kv_heads"))


def test_lines_of_unknown_seed_stand_as_one_of_their_mean():
    (found,) = depth_slopes(by_hand().assign(seed=None), knob_of(by_hand(), "n_kv_heads"))
    assert (found.effect.mean, found.effect.lo, found.n_seeds) == (pytest.approx(-0.02), None, 1)


def test_a_slope_contrast_by_hand():
    (found,) = depth_slopes(by_hand(), knob_of(by_hand(), "n_kv_heads"))
    # per doubling: -.10 in every line of 4 heads; -.11, -.12, -.13 of 1: differences -.01, -.02, -.03
    assert found.at_baseline.slope.mean == pytest.approx(-0.10)
    assert found.at_setting.slope.mean == pytest.approx(-0.12)
    assert found.effect.mean == pytest.approx(-0.02)
    assert found.effect.hi == pytest.approx(-0.02 + 4.30265 * 0.01 / math.sqrt(3), abs=1e-6)
    # noise: the seeds' slopes have sd 0 at 4 heads and .01 at 1
    noise = math.sqrt((0 + 0.0001) / 2)
    assert found.floor == pytest.approx(2.77645 * noise * math.sqrt(2 / 3), rel=1e-4)  # t with 4 df
    assert found.verdict == "not distinguishable"
    assert (found.n_seeds, found.effect.n, found.at_setting.depths) == (3, 3, (4, 8, 16))
    assert (found.at_setting.exponent, found.exponent_difference) == (None, None)
    said = slope_sentence(found)
    assert said.startswith(
        "n_kv_heads=1 vs n_kv_heads=4: depth slope of val_loss not distinguishable: -0.02 nat/token per doubling of "
        "n_layers (95% interval -0.0448 to +0.00484); effects above 0.031 would have been detected (80% power); "
        "3 pairs of lines over n_layers 4, 8, 16, 3 seeds, 2 df, noise floor 0.016"
    )
    assert "not identified (3 depths, 4 needed)" in said


def test_more_seeds_bring_no_depth_nearer_to_the_curve():
    """Depths lie .005 off 1 + 4 / L in turn, seeds .002 off that: eight tell the exponent no better than four."""
    off = {4: 0.005, 6: -0.005, 8: 0.005, 12: -0.005, 16: 0.005, 24: -0.005}
    sure = []
    for n_seeds in (4, 8):
        axes = {"n_layers": [*off], "seed": range(n_seeds)}
        runs = grid(
            axes,
            lambda config: {
                "val_loss": 1
                + 4 / config.n_layers
                + off[config.n_layers]
                + 0.002 * (-1) ** (config.seed * config.n_layers // 4)
            },
        )
        slope = depth_slope(runs)
        assert slope is not None and slope.exponent is not None
        sure.append(slope.exponent.hi - slope.exponent.lo)
    assert sure[1] == pytest.approx(sure[0], rel=0.1)


def test_a_clear_difference_is_called():
    runs = by_hand()
    steep = (runs["n_kv_heads"] == 1) * np.log2(runs["n_layers"])
    (found,) = depth_slopes(runs.assign(val_loss=runs["val_loss"] - 0.2 * steep), knob_of(runs, "n_kv_heads"))
    assert found.verdict == "lower" and found.effect.mean == pytest.approx(-0.22)
    (other,) = depth_slopes(runs.assign(val_loss=runs["val_loss"] + 0.2 * steep), knob_of(runs, "n_kv_heads"))
    assert other.verdict == "higher"


def test_seeds_that_agree_by_rounding_alone_do_not_make_a_slope_sure():
    """usefulness counts layers: one layer less of 4 (-.25) and of 8 (-.125) in every seed is a slope of .125 without
    any spread. Rounding gives each of the four runs h / sqrt 12, so the difference sqrt(2 (1/16 + 1/64) / 12)."""
    counts = {4: (0.75, 0.5), 8: (0.75, 0.625)}
    axes = {"n_layers": [4, 8], "n_kv_heads": [4, 1], "seed": [0, 1, 2]}
    runs = grid(axes, lambda config: {"usefulness": counts[config.n_layers][config.n_kv_heads == 1]})
    (found,) = depth_slopes(runs, knob_of(runs, "n_kv_heads"), "usefulness")
    assert found.effect.mean == pytest.approx(0.125) and set(found.by_seed) == {0.125}
    assert found.effect.error == pytest.approx(math.sqrt((1 / 16 + 1 / 64) / 6 / 3))
    assert found.verdict == "not distinguishable"


def test_rounding_is_that_of_the_line_that_it_moves_most():
    """Two seeds have 4 and 8 layers, where a slope rounds by (1/16 + 1/64) / 6; that over 4, 8 and 16 by (1/16 + 1/256)
    / 24."""
    counts = {4: (0.75, 0.5), 8: (0.75, 0.625), 16: (0.75, 0.75)}
    axes = {"n_layers": [4, 8, 16], "n_kv_heads": [4, 1], "seed": [0, 1, 2]}
    runs = grid(axes, lambda config: {"usefulness": counts[config.n_layers][config.n_kv_heads == 1]})
    runs = runs[(runs["n_layers"] < 16) | (runs["seed"] == 0)]
    (found,) = depth_slopes(runs, knob_of(runs, "n_kv_heads"), "usefulness")
    assert found.least_sd == pytest.approx(math.sqrt((1 / 16 + 1 / 64) / 6))


def test_lines_are_cut_to_the_depths_that_both_have():
    runs = by_hand()
    runs.loc[(runs["n_kv_heads"] == 1) & (runs["n_layers"] == 16) & (runs["seed"] == 0), "outcome"] = "diverged"
    runs.loc[(runs["n_kv_heads"] == 4) & (runs["n_layers"] > 4) & (runs["seed"] == 2), "val_loss"] = None
    (found,) = depth_slopes(runs, knob_of(runs, "n_kv_heads"))
    assert found.effect.n == 2  # seed 2 has one depth left, and no slope
    assert found.effect.mean == pytest.approx((-0.01 - 0.02) / 2)
    assert found.n_diverged == 1 and "1 run diverged" in slope_sentence(found)


def test_other_choices_are_matched():
    """Lines of lns never meet lines of none: of the other setting, there is no partner."""
    runs = by_hand()
    runs.loc[runs["n_kv_heads"] == 1, "depth_scale"] = "lns"
    runs.loc[runs["seed"] == 0, "depth_scale"] = "none"
    (found,) = depth_slopes(runs, knob_of(runs, "n_kv_heads"))
    assert found.effect.n == 1


def test_one_depth_has_no_slope():
    runs = by_hand()
    flat = runs[runs["n_layers"] == 4]
    assert depth_slopes(flat, knob_of(flat, "n_kv_heads")) == []
    assert depth_slope(flat) is None
    whole = depth_slope(runs)
    assert whole is not None and whole.slope.mean == pytest.approx(-0.11) and whole.slope.n == 6


def powers(noise=0.0, seed=0, depths=(2, 4, 8, 16, 32), exponents=((4, 1.0), (1, 1.5))):
    """E + c l^-a with another a by setting, and seeds that shift a whole line."""
    generator = np.random.default_rng(seed)
    shift = 0.05 * generator.standard_normal(4)
    by_setting = dict(exponents)

    def outcome(config):
        power = (config.n_layers / 2) ** -by_setting[config.n_kv_heads]
        return {"val_loss": 2.5 + shift[config.seed] + 0.8 * power + noise * generator.standard_normal()}

    return grid({"n_layers": depths, "n_kv_heads": [4, 1], "seed": [0, 1, 2, 3]}, outcome)


def test_exponents_come_back_where_depths_identify_them():
    runs = powers()
    (exact,) = depth_slopes(runs, knob_of(runs, "n_kv_heads"))
    assert exact.at_baseline.exponent.value == pytest.approx(1.0, abs=1e-5)
    assert exact.at_setting.exponent.value == pytest.approx(1.5, abs=1e-5)
    assert exact.exponent_difference.mean == pytest.approx(0.5, abs=1e-5)
    noisy = powers(noise=0.004, seed=1)
    (found,) = depth_slopes(noisy, knob_of(noisy, "n_kv_heads"))
    for at, truth in ((found.at_baseline, 1.0), (found.at_setting, 1.5)):
        assert at.exponent.lo < truth < at.exponent.hi and at.exponent.hi / at.exponent.lo < 1.3
    assert found.exponent_difference.covers(0.5) and found.exponent_difference.excludes_zero
    assert "difference of exponents +0.5" in slope_sentence(found)


def test_families_with_exponents_of_their_own_have_a_wide_common_one_and_two_have_none():
    """A common exponent of 0.6, 1 and 1.6 has the interval 0.89 to 1.26 by depths and seeds alone."""
    by_heads = {4: 1.0, 2: 0.6, 1: 1.6}
    generator = np.random.default_rng(0)

    def outcome(config):
        return {"val_loss": 2 + (config.n_layers / 2) ** -by_heads[config.n_kv_heads] + 0.002 * generator.normal()}

    runs = grid({"n_layers": (2, 4, 8, 16, 32), "n_kv_heads": [*by_heads], "seed": [0, 1, 2]}, outcome)
    common = depth_slope(runs).exponent
    assert common.lo < 0.6 and common.hi > 1.6
    assert depth_slope(runs[runs["n_kv_heads"] > 1]).exponent is None
    alone = depth_slope(runs[runs["n_kv_heads"] == 1]).exponent
    assert alone.value == pytest.approx(1.6, abs=0.03) and alone.hi / alone.lo < 1.2


def test_a_common_exponent_has_the_wider_interval_of_depths_and_families():
    """Three families without noise: the jackknife's, of pseudo-values 3 ln a - 2 ln a_without. And three that are
    almost alike but lie off the curve: that of one of them."""
    depths, off = np.array([2.0, 4, 8, 16, 32]), 0.002 * np.array([1, -1, 0, 1, -1])
    axes = {"n_layers": [2, 4, 8, 16, 32], "n_kv_heads": [4, 2, 1]}

    def exponent_of(loss_FD):
        def squares(log_a):
            columns = np.column_stack([np.ones(5), (depths / 2) ** -np.exp(log_a)])
            centred_D = columns[:, 1] - columns[:, 1].mean()
            y_FD = loss_FD - loss_FD.mean(axis=1, keepdims=True)
            c = (y_FD @ centred_D).sum() / (len(y_FD) * centred_D @ centred_D)
            return ((y_FD - c * centred_D) ** 2).sum()

        return minimize_scalar(squares, bounds=(-2, 2), method="bounded", options={"xatol": 1e-10}).x

    def found(loss_FD):
        runs = grid(axes, lambda c: {"val_loss": loss_FD[(4, 2, 1).index(c.n_kv_heads)][depths == c.n_layers][0]})
        return depth_slope(runs).exponent, depth_slope(runs[runs["n_kv_heads"] == 4]).exponent

    own_FD = 2 + (depths / 2) ** -np.array([[1.0], [0.6], [1.6]])
    log_a, without = exponent_of(own_FD), [exponent_of(np.delete(own_FD, i, axis=0)) for i in range(3)]
    half = 4.30265 * np.std([3 * log_a - 2 * each for each in without], ddof=1) / math.sqrt(3)
    common, _ = found(own_FD)
    assert common.value == pytest.approx(math.exp(log_a), rel=1e-5)
    assert (common.lo, common.hi) == pytest.approx((math.exp(log_a - half), math.exp(log_a + half)), rel=1e-3)
    alike, one = found(2 + (depths / 2) ** -np.array([[1.0], [1.0001], [0.9999]]) + off)
    assert (alike.lo, alike.hi) == pytest.approx((one.lo, one.hi), rel=1e-2)


def test_exponents_of_noise_are_not_identified():
    runs = powers(noise=0.3, depths=(8, 12, 16, 24))
    whole = depth_slope(runs)
    assert whole is not None and whole.exponent is None
    assert exponent_text(whole) == "not identified (no bounded interval)"
    rising = by_hand().assign(val_loss=lambda frame: frame["n_layers"] / 10)
    assert depth_slope(rising).exponent is None


def test_a_loss_that_rises_towards_a_limit_has_no_exponent():
    """2.5 - .8 / (l / 2) is a power law of the wrong sign: c > 0."""
    runs = powers()[lambda frame: frame["n_kv_heads"] == 4]
    assert depth_slope(runs).exponent.value == pytest.approx(1.0, abs=1e-5)
    assert depth_slope(runs.assign(val_loss=5 - runs["val_loss"])).exponent is None


def test_the_interval_of_an_exponent_by_its_profile():
    """Lines of five depths at 2.5 + .8 (l / 2)^-1 + off, each with its own E. At either end the least squares over all
    E and c exceed those at the optimum by t^2 s^2. One line has 5 - 3 df, t(2) = 4.30265; a second one that lies off
    the curve alike tells no more: s^2 is that of the depths' means. Where the second lies off to the other side, the
    means are on the curve, and s^2 is that of 10 - 4 df, t(6) = 2.44691."""
    depths, off = np.array([2.0, 4, 8, 16, 32]), 0.002 * np.array([1, -1, 0, 1, -1])

    def check(offs, excess_of):
        loss_SD = 2.5 + 0.8 * (depths / 2) ** -1.0 + np.array(offs)

        def squares(exponent):
            columns = np.column_stack(
                [np.kron(np.eye(len(offs)), np.ones((5, 1))), np.tile(depths**-exponent, len(offs))]
            )
            return np.linalg.lstsq(columns, loss_SD.ravel(), rcond=None)[1][0]

        axes = {"n_layers": [2, 4, 8, 16, 32], "seed": range(len(offs))}
        found = depth_slope(grid(axes, lambda c: {"val_loss": loss_SD[c.seed][depths == c.n_layers][0]})).exponent
        least = squares(found.value)
        assert all(squares(found.value + step) > least for step in (-1e-3, 1e-3))
        for end in (found.lo, found.hi):
            assert squares(end) - least == pytest.approx(excess_of(least), rel=1e-3)

    check([off], lambda least: 4.30265**2 * least / 2)
    check([off, off], lambda least: 4.30265**2 * least / 2)
    check([off, -off], lambda least: 2.44691**2 * least / 6)


def test_intervals_cover_and_noise_is_seldom_called():
    """60 sweeps of 5 depths x 2 settings x 4 seeds without a difference; 95% has a standard deviation of 2.8%: 87% to
    100%, and at most 10% called something."""
    runs = powers(exponents=((4, 1.0), (1, 1.0)))
    knob = knob_of(runs, "n_kv_heads")
    generator = np.random.default_rng(9)
    covered, called = [], []
    for _ in range(60):
        noise = 0.01 * generator.standard_normal(len(runs))
        (found,) = depth_slopes(runs.assign(val_loss=runs["val_loss"] + noise), knob)
        exponent = found.at_setting.exponent
        covered.append((found.effect.covers(0), found.exponent_difference.covers(0), exponent.lo < 1 < exponent.hi))
        called.append(found.verdict != "not distinguishable")
    assert (np.mean(covered, axis=0) >= 0.87).all(), np.mean(covered, axis=0)
    assert np.mean(called) <= 0.10, np.mean(called)


def test_an_unknown_outcome_is_refused():
    with pytest.raises(ValueError, match="outcome 'loss' is not a measured number"):
        depth_slopes(by_hand(), knob_of(by_hand(), "n_kv_heads"), "loss")
