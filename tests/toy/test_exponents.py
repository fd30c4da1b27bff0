"""The exponent's fit: planted laws are recovered, and what the losses do not tell is not told."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sparsedepth.toy.config import ToyConfig
from sparsedepth.toy.exponents import SETTINGS, exponents, fit_power_law, varied

DEPTHS = np.array([6, 12, 16, 24, 32, 48])


@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0, 4.0])
@pytest.mark.parametrize("rest", [0.0, 1e-4])
def test_a_planted_law_is_recovered(alpha, rest):
    fit = fit_power_law(DEPTHS, 0.7 * DEPTHS**-alpha + rest)
    assert fit.alpha == pytest.approx(alpha, rel=1e-3)
    assert fit.c == pytest.approx(0.7, rel=1e-2)
    assert fit.rest == pytest.approx(rest, rel=1e-2, abs=1e-9)
    assert np.allclose(fit(DEPTHS), 0.7 * DEPTHS**-alpha + rest, rtol=1e-3)
    if rest == 0:
        assert fit.slope == pytest.approx(alpha)


def test_the_fit_does_not_depend_on_the_losses_unit():
    loss = DEPTHS**-2.0 * np.array([1.1, 0.9, 1.0, 1.05, 0.95, 1.0]) + 1e-3
    small, large = fit_power_law(DEPTHS, loss * 1e-9), fit_power_law(DEPTHS, loss * 1e9)
    assert small.alpha == pytest.approx(large.alpha, rel=1e-6)


@pytest.mark.parametrize("loss", [DEPTHS**0.3, np.exp(-1.0 * DEPTHS)])
def test_a_loss_that_is_no_power_law_has_no_exponent(loss):
    fit = fit_power_law(DEPTHS, loss)
    assert fit.alpha is None and np.isfinite(fit.slope)


@pytest.mark.parametrize(
    ("depths", "loss", "says"),
    [([1, 2, 3], [3, 2, 1], "at least 4"), ([1, 2, 3, 4], [3, 2, 1, 0], "finite and positive")],
)
def test_what_cannot_be_fitted_is_refused(depths, loss, says):
    with pytest.raises(ValueError, match=says):
        fit_power_law(depths, loss)


def toys(alphas: dict[float, float], teachers: int = 4, noise: float = 0.02) -> pd.DataFrame:
    """Rows of the view `toys`: an exponent for each rho, noise by teacher."""
    rng, rows = np.random.default_rng(0), []
    fixed = {name: getattr(ToyConfig(), name) for name in SETTINGS if name not in ("rho", "temperature")}
    for rho, alpha in alphas.items():
        for teacher in range(teachers):
            own = alpha + noise * rng.standard_normal()
            for depth in DEPTHS:
                for seed in (0, 1):
                    row = {"rho": rho, "temperature": 1.0, "teacher_seed": teacher, "seed": seed, "n_layers": depth}
                    rows.append({**fixed, **row, "test_loss": (1 + 0.1 * seed) * depth**-own})
    return pd.DataFrame(rows)


def test_exponents_of_each_setting_with_intervals():
    independent, tied = exponents(toys({0.0: 1.0, 1.0: 3.0}))
    assert (independent.setting["rho"], tied.setting["rho"]) == (0.0, 1.0)
    assert independent.alpha.covers(1.0) and tied.alpha.covers(3.0) and not tied.alpha.covers(2.0)
    assert tied.slope.n == 4 and tied.depths == tuple(DEPTHS)
    assert varied([independent, tied]) == ["rho"]
    longer = replace(tied, setting={**tied.setting, "target": "mse", "n_steps": 7})
    assert varied([independent, tied, longer]) == ["target", "rho"]  # n_steps goes along with target
    assert tied.losses.query("n_layers == 6")["test_loss"].to_numpy() == pytest.approx(1.05 * 6.0**-3, rel=0.2)


def test_a_teacher_without_a_loss_does_not_count():
    rows = toys({0.0: 1.0})
    rows.loc[(rows["teacher_seed"] == 2) & (rows["n_layers"] == 12), "test_loss"] = None
    (found,) = exponents(rows)
    assert sorted(found.teachers) == [0, 1, 3]


def test_too_few_depths_have_no_exponent():
    assert exponents(toys({0.0: 1.0}).query("n_layers <= 16")) == []
