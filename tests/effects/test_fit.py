"""The fit of a depth, part by part, each by hand: shares, priors, optima beyond the grid, families and sums."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import stdtrit
from support.runs_frame import config_of, grid, runs_frame

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.curve import KAPPA, RHO, Normal, Values, _posterior
from sparsedepth.effects.fit import Fit, fit
from sparsedepth.effects.frame import effects_frame, setting_effects
from sparsedepth.effects.noise import Noise
from sparsedepth.effects.verdict import adjusted

NO_NOISE = Noise(*[np.ones((1, 1))] * len(Noise.__dataclass_fields__))


def test_the_share_of_the_baseline_is_its_part_of_the_effects_variance():
    """Of a mixture of two points: variances 2 and 4 of the baseline, 1 and 1 of the setting, means 3 and 1."""
    covariances = np.array([np.diag([2.0, 1.0]), np.diag([4.0, 1.0])])
    values = Values(np.zeros((2, 2)), covariances, np.array([0.5, 0.5]), *[np.zeros(2)] * 3)
    found = Fit(values, NO_NOISE, np.ones(2), np.zeros(2), has_curve=False, level_C=np.zeros(2))
    assert found.share_of_baseline(setting=1, baseline=0) == pytest.approx(3 / 4)
    assert found.share_of_baseline(setting=0, baseline=1) == pytest.approx(1 / 4)


def test_the_share_that_judges_a_setting_is_that_of_its_baseline(monkeypatch):
    asked = []
    monkeypatch.setattr(Fit, "share_of_baseline", lambda found, *pair: asked.append(pair) or 0.5)
    rng = np.random.default_rng(0)
    axes = {"weight_decay": (0.1, 0.2, 0.3), "seed": range(3)}
    cells = cells_of(grid(axes, lambda config: {"val_loss": 3 + 0.01 * rng.standard_normal()}, n_layers=4), "val_loss")
    effects_frame(cells)
    (at,) = cells.depths
    named = {(at.order[setting], at.order[baseline]) for setting, baseline in asked}
    assert named >= {("weight_decay=0.2", "baseline"), ("weight_decay=0.3", "baseline")}
    assert all(setting != "baseline" for setting, _ in named)


def test_fitted_values_are_where_the_results_are_of_those_seeds_that_connect_the_cells():
    """One length with seeds 0 to 2 has losses about 3, another with seeds 3 to 5 about 2."""
    rng = np.random.default_rng(0)
    axes = {"weight_decay": (0.1, 0.2), "seq_len": (32, 64), "seed": range(6)}
    runs = grid(axes, lambda config: {"val_loss": 4 - config.seq_len / 32 + 0.01 * rng.standard_normal()}, n_layers=4)
    runs = runs[(runs["seq_len"] == 64) == (runs["seed"] > 2)]
    (row,) = setting_effects(cells_of(runs, "val_loss")).dropna(subset="estimate").itertuples()
    means = runs[runs["seq_len"] == 32].groupby("weight_decay")["val_loss"].mean()
    assert (row.fitted_baseline, row.fitted) == pytest.approx(tuple(means))


def test_an_optimum_beyond_the_values_tried_is_told_of_the_cell_that_has_it():
    """Curves (u - m)^2 over u = -1, 0, 1: at m = 0 the optimum is inside; at 4 and at -4 beyond either end."""
    rng = np.random.default_rng(0)
    cell_N, u_N, seed_N = (x.ravel() for x in np.meshgrid(range(3), (-1.0, 0.0, 1.0), range(6), indexing="ij"))
    y_N = (u_N - np.array([0.0, 4.0, -4.0])[cell_N]) ** 2 + 0.05 * rng.standard_normal(len(u_N))
    found = fit(cell_N, u_N, seed_N, y_N, np.zeros(len(u_N), dtype=bool))
    assert found is not None
    inside, above, below = found.values.outside_C
    # Were the curves steeper above their optima, that below the grid would lie nearer to it.
    assert inside < 0.1 and 0.9 < above <= 1 and 0.8 < below <= 1


@pytest.mark.parametrize("beyond", ["none", "lns"])
def test_the_side_whose_optimum_lies_beyond_bars_the_verdict_only_where_it_loses(beyond):
    """Tuning chose the middle lr for both, by luck: the curve of one falls on beyond the values tried."""
    rng = np.random.default_rng(0)
    rows = []
    for scale, lr in itertools.product(("none", "lns"), (0.001, 0.002, 0.004)):
        for seed in (100, 101, *(range(4) if lr == 0.002 else ())):
            config = config_of(n_layers=4, depth_scale=scale, lr=lr, seed=seed)
            optimum, level = (0.032, 3.0) if scale == beyond else (0.002, 3.5)
            loss = level + 0.05 * math.log2(lr / optimum) ** 2 - 2 * (scale == "lns") + 0.01 * rng.standard_normal()
            role = "rejected" if lr != 0.002 else "tuning" if seed >= 100 else "best"
            rows.append((config, {"val_loss": loss, "tuned_fields": "lr", "tuned_by": "val_loss", "tuning": role}))
    (found,) = (row for _, row in setting_effects(cells_of(runs_frame(rows), "val_loss")).iterrows())
    assert found["verdict"] == ("not shown" if beyond == "none" else "lower")
    assert ("the baseline's optimum" in found["reason"]) == (beyond == "none")


def test_the_prior_of_an_optimum_is_the_error_of_choosing_the_best_of_a_grid():
    """omega^2 = .3^2 + 2 (rho^2 + 1 / tuning seeds) s^2 / kappa^2, and at most 2.5^2; a slope is -kappa u*. What says
    nothing of a slope leaves it its prior."""
    n, nothing = len(RHO), np.zeros((len(RHO), 3, 2))
    given = Normal(np.tile(np.diag([1.0, 0.0, 1.0]), (n, 1, 1)), nothing, np.zeros((n, 2, 2)), np.zeros(n))
    rho_G, kappa_G = (each.ravel() for each in np.meshgrid(RHO, KAPPA, indexing="ij"))
    tuning_seeds = 4
    precision_GTT = _posterior(given, rho_G, kappa_G, np.array([1 / tuning_seeds])).precision_GTT
    variance_G = np.linalg.inv(precision_GTT)[:, 1, 1]
    for rho, kappa, variance in zip(rho_G, kappa_G, variance_G, strict=True):
        omega2 = 0.3**2 + 2 * (rho**2 + 0.25) / kappa**2
        assert variance == pytest.approx(kappa**2 * min(omega2, 2.5**2))


def test_adjusted_p_values_never_fall_where_p_rises():
    """Step-down (Holm-Sidak): .03 of two is 1 - .97^2 = .0591; .031, of the one that is left, is no less than that."""
    assert adjusted(np.array([0.031, 0.03]), np.zeros(2)) == pytest.approx([1 - 0.97**2] * 2, rel=1e-6)


def test_a_slope_over_two_depths_is_a_sum_of_independent_effects():
    """Differences of pairs have means -.15 and -.25 and errors .05 / sqrt(3) and .15 / sqrt(3), each with 2 degrees of
    freedom. Per doubling from 4 to 16 layers the weights are -1/2 and 1/2; their squares count in the variance, and
    the degrees of freedom are Satterthwaite's."""
    differences = {4: (-0.2, -0.1, -0.15), 16: (-0.4, -0.1, -0.25)}

    def loss(config):
        return {
            "val_loss": 3
            + 0.1 * config.seed
            + (config.depth_scale == "lns") * differences[config.n_layers][config.seed]
        }

    axes = {"depth_scale": ["none", "lns"], "n_layers": [4, 16], "seed": range(3)}
    found = effects_frame(cells_of(grid(axes, loss), "val_loss"))
    (slope,) = (row for _, row in found.iterrows() if row["question"] == "depth slope")
    variances = np.array([0.05**2 / 3, 0.15**2 / 3]) / 4
    df = variances.sum() ** 2 / (variances**2 / 2).sum()
    assert slope["estimate"] == pytest.approx(-0.05)
    assert slope["df"] == pytest.approx(df, rel=1e-3)
    half = stdtrit(df, 0.975) * math.sqrt(variances.sum())
    assert (slope["hi"] - slope["lo"]) / 2 == pytest.approx(half, rel=0.02)


def test_the_weights_of_what_is_kept_add_up_to_1():
    """Curves that are clearly parabolas: a steepness without weight is left out, and misses in no tail."""
    rng = np.random.default_rng(0)
    cell_N, u_N, seed_N = (x.ravel() for x in np.meshgrid(range(3), np.arange(-2.0, 3.0), range(8), indexing="ij"))
    y_N = u_N**2 + 0.3 * rng.standard_normal(len(u_N))
    found = fit(cell_N, u_N, seed_N, y_N, np.zeros(len(u_N), dtype=bool))
    assert found is not None and found.values.weight_G.sum() == pytest.approx(1, abs=1e-12)
    assert found.combine(np.array([1.0, -1.0, 0.0])).below(np.array([np.inf])) == pytest.approx(1, abs=1e-12)
