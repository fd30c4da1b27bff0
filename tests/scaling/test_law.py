"""The law's formula, worked out by hand, and its derivatives against differences."""

import math

import numpy as np
import pandas as pd
import pytest
from support.depth_law_points import grid, planted, theta_of

from sparsedepth.scaling.law import TERMS, Law, design, fitted_loss, jacobian


def test_a_loss_by_hand():
    """100^-1/2 x 10 + 400^-1/2 x 8 + 1^-0.3 x 0.5 + 1 = 1 + 0.4 + 0.5 + 1: l counts hundredths, D millions."""
    plan = design(pd.DataFrame([{"d_model": 100.0, "n_layers": 4.0, "num_tokens": 1e6, "loss": 3.0}]), Law())
    theta_P = np.array([math.log(1.0), math.log(0.4), math.log(0.5), 0.5, 0.5, 0.3, 0.0])
    stated = {number.name: number.of(theta_P) for number in plan.quantities()}
    assert [stated[name] for name in ("c_m", "c_l", "c_D")] == pytest.approx([10, 8, 0.5])
    assert fitted_loss(theta_P, plan.z) == pytest.approx([2.9])
    # four times as deep: 1600^-1/2 x 8 = 0.2
    assert fitted_loss(theta_P, plan.z + np.array([[0], [math.log(4)], [0]])) == pytest.approx([2.7])


def test_the_jacobian_is_the_derivative():
    plan = design(planted(grid()), Law())
    theta_P = theta_of(plan)
    by_NP = jacobian(theta_P, plan.z)
    for p in range(len(theta_P)):
        shift = 1e-6 * np.eye(len(theta_P))[p]
        up, down = (np.log(fitted_loss(theta_P + sign * shift, plan.z)) for sign in (1, -1))
        assert by_NP[:, p] == pytest.approx((up - down) / 2e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fixed": {"a_x": 1.0}}, "cannot fix 'a_x': the exponents of this law are a_D, a_l, a_m"),
        ({"fixed": {"a_l": -1.0}}, "cannot fix a_l=-1.0"),
        ({"terms": TERMS[:1], "fixed": {"a_l": 1.0}}, "cannot fix 'a_l'"),
        ({"terms": ()}, "nothing to fit"),
    ],
)
def test_a_law_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Law(**options)
