"""Compute multipliers: public numbers by hand, planted ones, what is refused or withheld. The power law behind them:
exact curves, seeds as units, and what the data allow for L_inf."""

import numpy as np
import pandas as pd
import pytest
from support.budget_results import rows_of

from sparsedepth.scaling.speedup import Speedup, in_time, power_law, speedup, speedups
from sparsedepth.words.scaling import worth_sentence

C, L_INF, A, ALPHA = 3.82e17, 1.6, (3.5422 - 1.6) * 3.82e17**0.0941, 0.0941
PUBLIC = {C * share: {seed: L_INF + A * (C * share) ** -ALPHA for seed in (0, 1)} for share in (0.25, 0.5, 1)}
"""A gate of a public training framework: L_inf 1.6, alpha .0941; 3.5422 -> 3.52 nat/token at 3.82e17 FLOPs, 433,986 ->
410,000 tokens/s."""


def test_public_numbers_as_rows():
    """The baseline's curve from three budgets, and the setting at the largest at 94% of the speed."""
    runs = [(24, "baseline", seed, C, loss, 433_986) for C, losses in PUBLIC.items() for seed, loss in losses.items()]
    runs += [(24, "depth_scale=lns", seed, C, 3.52, 410_000) for seed in (0, 1)]
    (row,) = speedups(rows_of(runs)).to_dict("records")
    assert row["multiplier"] == pytest.approx(1.130, abs=5e-4)
    assert row["time_multiplier"] == pytest.approx(1.067, abs=1e-3)
    assert worth_sentence(row) == (
        "n_layers=24, depth_scale=lns: worth 1.13 times the compute (1.13 to 1.13), 1.07 times the time (1.07 to 1.07) "
        "at 3.8e17 FLOPs"
    )


def test_flops_of_one_budget_may_differ_by_run():
    """As in imported tables."""
    runs = [(24, "baseline", seed, C, loss, 1.0) for C, losses in PUBLIC.items() for seed, loss in losses.items()]
    runs += [(24, "depth_scale=lns", seed, C * (1 + 0.02 * seed), 3.52, 1.0) for seed in (0, 1)]
    rows = rows_of(runs)
    rows.loc[rows["setting"] != "baseline", "train_tokens"] = rows["train_tokens"].max()
    assert speedups(rows)["multiplier"].tolist() == [pytest.approx(1.130 / 1.01, abs=1e-3)]


def test_runs_of_one_seed_count_by_their_mean_in_any_order():
    """As in imported tables without seeds: the means are the public losses."""
    runs = [(24, "baseline", -1, C, losses[0] + d, 1.0) for C, losses in PUBLIC.items() for d in (0.1, -0.1)]
    runs += [(24, "depth_scale=lns", -1, C, 3.52 + d, 1.0) for d in (0.2, -0.2)]
    for ordered in (runs, runs[::-1]):
        assert speedups(rows_of(ordered))["multiplier"].tolist() == [pytest.approx(1.130, abs=5e-4)]


def test_the_curve_is_of_the_seeds_that_all_budgets_share_though_each_budget_lost_another():
    lost = {
        budget: {seed: losses[0] for seed in range(5) if seed != n} for n, (budget, losses) in enumerate(PUBLIC.items())
    }
    assert power_law(lost).seeds == (3, 4) and len(power_law(lost).C) == 3


def test_a_setting_that_spends_less_is_worth_as_much_more():
    """Half the FLOPs for the baseline's loss at the whole: twice the compute."""
    runs = [(24, "baseline", seed, C, loss, 1.0) for C, losses in PUBLIC.items() for seed, loss in losses.items()]
    runs += [(24, "n_kv_heads=1", seed, C / 2, PUBLIC[C][seed], None) for seed in (0, 1)]
    (row,) = speedups(rows_of(runs)).to_dict("records")
    assert row["multiplier"] == pytest.approx(2.0, rel=1e-6) and pd.isna(row["time_multiplier"])


def test_the_time_has_the_error_of_the_speeds_too():
    """Speeds of 1.1, 1.2 and 1.3 times the baseline's: the half-width of their mean ln is t s / sqrt 3, t = 4.3027."""
    speed_S = np.log([1.1, 1.2, 1.3])
    half = 4.3027 * speed_S.std(ddof=1) / 3**0.5
    timed = in_time(Speedup(multiplier=1.5, lo=1.5, hi=1.5, n_pairs=3), speed_S)
    assert timed.multiplier == pytest.approx(1.5 * (1.1 * 1.2 * 1.3) ** (1 / 3))
    assert np.log(timed.hi / timed.multiplier) == pytest.approx(half, rel=1e-4)
    wide = in_time(Speedup(multiplier=1.5, lo=1.0, hi=2.25, n_pairs=3), speed_S)
    assert np.log(wide.multiplier / wide.lo) == pytest.approx(np.hypot(np.log(1.5), half), rel=1e-4)
    assert in_time(wide, np.array([])).multiplier is None and in_time(wide, speed_S[:1]).lo is None


def test_the_choice_of_lr_widens_the_interval_by_its_error_in_the_loss():
    """To first order ln of the multiplier changes by dL / (alpha (L - L_inf)). The effect at the optimum is -.0222, as
    the results of 3.54 here show but in part: the public example's multiplier."""
    curve, setting = power_law(PUBLIC), {0: 3.54, 1: 3.54}
    wide = speedup(curve, PUBLIC[C], setting, effect=(3.52 - 3.5422, 0.02))
    assert wide.multiplier == pytest.approx(1.130, abs=5e-4) and speedup(curve, PUBLIC[C], setting).multiplier < 1.02
    error = 0.02 / (3.52 - 1.6) / ALPHA
    assert np.log(wide.hi / wide.multiplier) == pytest.approx(1.959964 * error, rel=1e-3)
    assert np.log(wide.multiplier / wide.lo) == pytest.approx(1.959964 * error, rel=1e-3)


SEEDS, BUDGETS = range(6), (1e12, 2e12, 4e12, 8e12)


def planted(multiplier: float, noise: float, seed: int, n_seeds: int = 6):
    """Losses of the baseline by budget, and at 4e12 FLOPs of a setting that does what the baseline does with
    `multiplier` times the compute; a seed shifts both."""
    draws = np.random.default_rng(seed)
    shift = {number: noise * draws.standard_normal() for number in range(n_seeds)}

    def loss(C: float, number: int) -> float:
        return 1.0 + 3000.0 * C**-0.3 + shift[number] + 0.3 * noise * draws.standard_normal()

    curve = {C: {number: loss(C, number) for number in shift} for C in BUDGETS}
    return curve, {number: loss(multiplier * 4e12, number) for number in shift}


@pytest.mark.parametrize("n_seeds", [3, 6])
@pytest.mark.parametrize("multiplier", [1.0, 1.3])
def test_a_planted_multiplier_is_covered(multiplier, n_seeds):
    draws = []
    for seed in range(40):
        curve, setting = planted(multiplier, 0.002, seed, n_seeds)
        draws.append(speedup(power_law(curve), curve[4e12], setting))
    given = [draw for draw in draws if draw.lo is not None]
    assert len(given) >= 36
    covered = sum(draw.lo <= multiplier <= draw.hi for draw in given)  # of 300 worlds 93 to 98%
    assert covered >= 0.85 * len(given)
    assert np.median([draw.multiplier for draw in given]) == pytest.approx(multiplier, rel=0.02)
    if multiplier > 1:
        assert sum(draw.lo > 1 for draw in given) >= 0.8 * len(given)


def test_an_offset_that_is_not_identified_gives_a_range():
    curve, setting = planted(1.3, 0.03, 0, n_seeds=3)
    worth = speedup(power_law(curve), curve[4e12], setting)
    assert "L_inf is not identified: the range over 0 to " in worth.reason and worth.lo < 1.3 < worth.hi


def test_one_setting_and_fewer_than_three_budgets_are_refused_by_name():
    curve, setting = planted(1.0, 0.0, 0)
    runs = [(8, "baseline", s, C, loss, None) for C in BUDGETS for s, loss in curve[C].items()]
    others = [(8, "norm=post", s, 4e12, loss, None) for s, loss in setting.items()]
    with pytest.raises(ValueError, match="all runs have one setting"):
        speedups(rows_of(runs))
    shallow = [(4, "baseline", s, C, loss, None) for _, _, s, C, loss, _ in runs[:6]]
    table = speedups(rows_of([*runs, *others, *shallow]))
    assert len(table) == 1 and "n_layers=4: the baseline has train_tokens=1000: 1 budget," in table.attrs["refused"][0]


def test_a_loss_below_the_floor_and_unpaired_seeds_give_nothing():
    curve = power_law(PUBLIC)
    below = speedup(curve, PUBLIC[C], {0: 1.5, 1: 1.55})
    assert below.multiplier is None and "may end at 1.6 nat/token, and the lowest loss is 1.5" in below.reason
    assert speedup(curve, PUBLIC[C], {2: 1.9}).multiplier is None
    assert speedup(curve, PUBLIC[C], {0: 3.52}).reason == "one seed: no interval"


# The power law


def curves(noise: float = 0.0, n_seeds: int = 4, budgets=BUDGETS, seed: int = 0) -> dict[float, dict[int, float]]:
    """1.6 + 87.65 C^-.0941, times a factor of each seed and noise of each run, in ln(L - 1.6)."""
    draws = np.random.default_rng(seed)
    shift_S = 0.05 * draws.standard_normal(n_seeds)
    return {
        C: {s: 1.6 + 87.65 * C**-0.0941 * np.exp(shift_S[s] + noise * draws.standard_normal()) for s in range(n_seeds)}
        for C in budgets
    }


def test_an_exact_curve_is_found_whatever_the_levels_of_the_seeds():
    law = power_law(curves())
    assert law.L_inf == pytest.approx(1.6, abs=1e-6) and law.alpha == pytest.approx(0.0941, abs=1e-6)
    assert law.alphas(1.6) == pytest.approx([0.0941] * 4)
    assert law.allowed[0] == pytest.approx(law.allowed[-1]) and law.is_identified


def test_three_budgets_of_one_seed_are_the_least():
    law = power_law(curves(n_seeds=1, budgets=BUDGETS[:3]))
    assert law.L_inf == pytest.approx(1.6) and len(law.allowed) == 1
    with pytest.raises(ValueError, match=r"^2 budgets, and 3 of one seed are needed"):
        power_law(curves(budgets=BUDGETS[:2]))
    spread = {C: {number: 1 + 1e3 * C**-0.3} for number, C in enumerate(BUDGETS)}  # no two budgets of one seed
    with pytest.raises(ValueError, match="4 budgets, and 3 of one seed"):
        power_law(spread)


def test_the_largest_block_of_seeds_and_budgets_is_used():
    losses = curves()
    losses[1.6e13] = {0: losses[8e12][0]}
    assert len(power_law(losses).C) == 4 and power_law(losses).seeds == (0, 1, 2, 3)


def test_what_the_data_allow_covers_the_offset_and_noise_widens_it():
    laws = [power_law(curves(noise=0.002, n_seeds=5, seed=seed)) for seed in range(40)]
    assert sum(law.allowed[0] <= 1.6 <= law.allowed[-1] for law in laws) >= 35
    quiet, noisy = (power_law(curves(noise=noise, seed=1)).allowed for noise in (0.0005, 0.02))
    assert noisy[-1] - noisy[0] > 3 * (quiet[-1] - quiet[0])
    assert not power_law(curves(noise=0.02, seed=1)).is_identified


def test_a_line_in_ln_c_has_no_offset_above_0():
    """3 - .1 ln C is too straight for any offset."""
    losses = {C: {seed: 5 - 0.1 * np.log(C) + 0.01 * seed for seed in range(3)} for C in BUDGETS}
    law = power_law(losses)
    assert law.L_inf == 0 and not law.is_identified


def test_losses_that_rise_or_are_not_positive_are_refused():
    losses = curves()
    with pytest.raises(ValueError, match="does not fall with the budget"):
        power_law(dict(zip(BUDGETS, reversed(losses.values()), strict=True)))
    losses[4e12][1] = 0.0
    with pytest.raises(ValueError, match="not positive"):
        power_law(losses)
