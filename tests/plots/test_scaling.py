"""The depth law's figure: its numbers add up, and the file is reproducible."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from support.depth_law_points import grid, planted

from sparsedepth.plots.scaling import draw_law, law_page
from sparsedepth.scaling.fit_law import bootstrap, fit_law
from sparsedepth.scaling.law import Law
from sparsedepth.scaling.report import curve_of, law_points


@pytest.fixture(scope="module")
def fitted():
    return fit_law(planted(grid(), noise=0.003))


def test_parts_and_residuals_add_up_to_the_loss(fitted):
    points = law_points(fitted)
    e = np.exp(fitted.theta[0])
    parts = points["width_part"] + points["depth_part"] + points["data_part"]
    assert (parts + e).to_numpy() == pytest.approx(points["fitted"].to_numpy())
    rest = points["depth_rest"] + points["width_part"] + points["data_part"] + e
    assert rest.to_numpy() == pytest.approx(points["loss"].to_numpy())
    assert points["residual"].to_numpy() == pytest.approx(np.log(points["loss"] / points["fitted"]).to_numpy())


def test_the_curve_is_the_fit_inside_its_band(fitted):
    boot = bootstrap(fitted, 100)
    curve = curve_of(fitted, boot, 1)
    assert (curve["n_layers"].iloc[0], curve["n_layers"].iloc[-1]) == pytest.approx((4, 64))
    slope = np.diff(np.log(curve["fitted"])) / np.diff(np.log(curve["n_layers"]))
    assert slope == pytest.approx(-fitted.parameters["a_l"].value)
    assert ((curve["lo"] < curve["fitted"]) & (curve["fitted"] < curve["hi"])).all()
    titles = [axis.get_title() for axis in law_page(law_points(fitted), fitted, boot).axes]
    assert titles[1].startswith(f"depth: a_l = {fitted.parameters['a_l'].value:.3f} (")
    assert curve_of(fitted, None, 1)["lo"].isna().all()


def test_an_exponent_without_an_interval_is_fixed_only_where_it_was(fitted):
    """Of width 0.3, which is fixed, and of depth, of which the points do not tell the error."""
    held = fit_law(fitted.points, Law(fixed={"a_m": 0.3}))
    open_ended = replace(held, covariance=np.full_like(held.covariance, np.nan))
    titles = [axis.get_title() for axis in law_page(law_points(open_ended), open_ended, None).axes]
    assert " = 0.300 (fixed)" in titles[0] and titles[1].startswith("depth: ") and " (interval unknown)" in titles[1]


def test_points_below_zero_are_counted_not_drawn(fitted):
    points = fitted.points.copy()
    points.loc[79, "loss"] *= 0.8
    low = fit_law(points)
    numbers = law_points(low)
    below = [term.name for term in low.law.terms if (numbers[f"{term.name}_rest"] <= 0).sum() == 1]
    page = law_page(numbers, low)
    titles = [axis.get_title() for axis in page.axes if "1 point at or below 0 not shown" in axis.get_title()]
    assert len(titles) == len(below) > 0


def test_the_file_is_reproducible_and_its_numbers_are_next_to_it(fitted, tmp_path):
    data = draw_law(fitted, None, tmp_path / "a.svg")
    draw_law(fitted, None, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert data == tmp_path / "a.csv" and len(pd.read_csv(data)) == 80
    with pytest.raises(ValueError, match=r"must end in one of: \.png"):
        draw_law(fitted, None, tmp_path / "a.gif")
