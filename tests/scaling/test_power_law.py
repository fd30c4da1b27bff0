"""The power law with an offset: exact curves, seeds as units, and what the data allow for L_inf."""

import numpy as np
import pytest

from sparsedepth.scaling.power_law import power_law

BUDGETS = (1e12, 2e12, 4e12, 8e12)


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
