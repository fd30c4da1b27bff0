"""The law's formula, worked out by hand, and its derivatives against differences."""

import math

import numpy as np
import pandas as pd
import pytest
from support.depth_law_points import grid, planted, theta_of

from sparsedepth.scaling.law import TERMS, Law, contributions, design, jacobian, predict


def one_point(**changes):
    return pd.DataFrame([{"d_model": 100.0, "n_layers": 4.0, "num_tokens": 1e6, "loss": 3.0} | changes])


def test_a_loss_by_hand():
    """100^-1/2 x 10 + 400^-1/2 x 8 + 1^-0.3 x 0.5 + 1 = 1 + 0.4 + 0.5 + 1: l counts hundredths, D millions."""
    plan = design(one_point(), Law())
    theta_RP = np.array([[math.log(1.0), math.log(0.4), math.log(0.5), 0.5, 0.5, 0.3, 0.0]])
    stated = {number.name: number.of(theta_RP)[0] for number in plan.quantities()}
    assert [stated[name] for name in ("c_m", "c_l", "c_D")] == pytest.approx([10, 8, 0.5])
    assert predict(theta_RP, plan, one_point())[0, 0] == pytest.approx(2.9)
    # four times as deep: 1600^-1/2 x 8 = 0.2
    assert predict(theta_RP, plan, one_point(n_layers=16.0))[0, 0] == pytest.approx(2.7)


def test_layers_can_be_left_out_of_the_count():
    law = Law(minus_layers=2)
    plan = design(one_point(n_layers=3.0), law)
    assert plan.centre[1] == pytest.approx(math.log(100))
    assert law.text() == "L = c_m m^-a_m + c_l (l - 2)^-a_l + c_D D^-a_D + E"
    with pytest.raises(ValueError, match="minus_layers=2 leaves no layer of n_layers=2"):
        design(one_point(n_layers=2.0), law)


def test_the_jacobian_is_the_derivative():
    plan = design(planted(grid()), Law())
    theta_P = theta_of(plan)
    _, by_RPN = jacobian(theta_P[None], plan.z)
    for p in range(len(theta_P)):
        shift = 1e-6 * np.eye(len(theta_P))[p]
        ends = [jacobian((theta_P + sign * shift)[None], plan.z)[0][0] for sign in (1, -1)]
        assert by_RPN[0, p] == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)


def test_contributions_add_up_to_the_planted_loss():
    points = planted(grid())
    plan = design(points, Law())
    term_RKN, e_R = contributions(theta_of(plan)[None], plan.z)
    assert term_RKN[0].sum(axis=0) + e_R[0] == pytest.approx(points["loss"].to_numpy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fixed": {"a_x": 1.0}}, "cannot fix 'a_x': the exponents of this law are a_D, a_l, a_m"),
        ({"fixed": {"a_l": -1.0}}, "cannot fix a_l=-1.0"),
        ({"terms": TERMS[:1], "fixed": {"a_l": 1.0}}, "cannot fix 'a_l'"),
        ({"minus_layers": -1.0}, "minus_layers=-1.0 must be 0 or more"),
        ({"terms": ()}, "nothing to fit"),
    ],
)
def test_a_law_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Law(**options)
