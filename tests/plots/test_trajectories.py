"""The angle of the middle layers against depth: its points, the law and its interval, an error without two depths."""

import math

import numpy as np
import pytest
from support.runs_frame import labelled_grid as grid

from sparsedepth.plots.depth import angles_by_depth, turn_law
from sparsedepth.plots.page import NothingToDraw


def runs_with(angle, **axes):
    axes = {"n_layers": [4, 8], "seed": [0, 1], **axes}
    return grid(axes, lambda config: {"val_loss": 3.0, "angular_distance_middle": angle(config)})


def test_a_line_and_a_law_for_each_setting():
    runs = runs_with(
        lambda config: (2 if config.depth_scale == "none" else 3) / config.n_layers, depth_scale=["none", "lns"]
    )
    drawing = angles_by_depth(runs)
    points = drawing.data.set_index(["setting", "x"])
    assert points["mean"].tolist() == pytest.approx([0.5, 0.75, 0.25, 0.375]) and set(points["b"].round(6)) == {1.0}
    page = drawing.page()
    (legend,) = page.legends
    labels = [text.get_text().replace("\u00a0", " ") for text in legend.get_texts()]
    assert labels == ["baseline, b = 1.00", "depth_scale=lns, b = 1.00"]
    assert (page.axes[0].get_xscale(), page.axes[0].get_yscale()) == ("log", "log")


def test_without_an_angle_at_two_depths_there_is_nothing_to_draw():
    """A model of two layers has no middle ones."""
    for runs in (
        runs_with(lambda config: None if config.n_layers == 4 else 0.2),
        runs_with(lambda config: 0.2).assign(outcome=["ok", "ok", "diverged", "diverged"]),
    ):
        with pytest.raises(NothingToDraw, match="'geometry' at two depths"):
            angles_by_depth(runs)


def test_the_exponent_and_its_interval_by_hand():
    """log2 angle at log2 L = 1, 2, 3: 0, -1, -2.3 and the same 0.1 higher."""
    at = {(2, 0): 0.0, (4, 0): -1.0, (8, 0): -2.3, (2, 1): 0.1, (4, 1): -0.9, (8, 1): -2.2}
    runs = runs_with(lambda config: 2.0 ** at[config.n_layers, config.seed], n_layers=[2, 4, 8])
    b, low, high = turn_law(angles_by_depth(runs).data)
    assert (b, high - b) == pytest.approx((1.15, b - low))
    # Sxx = 4 (in log2); the means lie -1/20, 1/10, -1/20 off the line: s^2 = 0.015 with one degree of freedom
    assert b - low == pytest.approx(12.7062 * math.sqrt(0.015 / 2), rel=1e-4)
    dotted = angles_by_depth(runs).page().axes[0].get_lines()[-1]
    assert np.interp(4.0, *dotted.get_data()) == pytest.approx(2**-1.05, rel=0.01)  # the mean, at the middle
