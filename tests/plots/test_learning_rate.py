"""Curves over the learning rate: one per setting, best and edge, no means over surviving seeds only."""

import math

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import labelled_grid

from sparsedepth.plots.by_setting import by_rate
from sparsedepth.plots.page import NothingToDraw

RATES = [1e-3, 3e-3, 1e-2]


def summary(config):
    best = 3e-3 if config.depth_scale == "none" else 1e-2
    return {"val_loss": 3 + math.log(config.lr / best) ** 2 + 0.1 * config.seed}


def made(axes, outcome=summary):
    runs = labelled_grid(axes, outcome, n_layers=4)
    return runs.assign(setting=runs["depth_scale"].map({"none": "baseline", "lns": "depth_scale=lns"}))


def caption(drawing):
    return " ".join(drawing.page().get_supxlabel().split())


def test_best_and_edge():
    runs = made({"depth_scale": ["none", "lns"], "lr": RATES, "seed": [0, 1]})
    points = by_rate(runs).data
    assert len(points) == 6 and set(points["n_seeds"]) == {2}
    roles = {(row.setting, row.x): row.role for row in points.itertuples() if row.role}
    assert roles == {("baseline", 3e-3): "best", ("depth_scale=lns", 1e-2): "edge"}
    assert points.loc[points["role"] == "best", "mean"].tolist() == [3.05]
    assert marks_explained(runs) == ["lowest", "at the end of the grid"]
    assert marks_explained(runs[runs["setting"] == "baseline"]) == ["lowest"]


def test_a_panel_that_was_asked_for_has_the_numbers_of_the_whole():
    """Also the intervals, which are in the data alone."""
    drawing = by_rate(made({"lr": RATES, "seed": [0, 1, 2]}))
    assert drawing.data["lo"].notna().all()
    pd.testing.assert_frame_equal(drawing.of_panels(["4"]).data, drawing.data)


def marks_explained(runs):
    (legend,) = by_rate(runs).page().legends
    return [text.get_text() for text in legend.get_texts()][runs["setting"].nunique() :]


def test_a_diverged_seed_leaves_no_point():
    runs = made({"lr": RATES, "seed": [0, 1]})
    runs.loc[(runs["lr"] == 1e-2) & (runs["seed"] == 1), "outcome"] = "diverged"
    points = by_rate(runs).data
    assert np.isnan(points.set_index("x").loc[1e-2, "mean"])
    assert "1 value where a seed diverged" in caption(by_rate(runs))
    with pytest.raises(NothingToDraw, match="at two learning rates"):  # one value each is no curve
        by_rate(made({"depth_scale": ["none", "lns"]}))


def test_a_line_has_the_seeds_of_all_its_points_and_the_ring_the_chosen_lr():
    """Tuning chose 3e-3 by seed 0; seeds 5 and 6, of the chosen value alone, are much worse and moved the curve."""
    tried = made({"lr": RATES, "seed": [0]}).assign(tuning="rejected")
    tried.loc[tried["lr"] == 3e-3, "tuning"] = "tuning"
    chosen = made({"lr": [3e-3], "seed": [5, 6]}, lambda config: {"val_loss": 9.0})
    drawing = by_rate(pd.concat([tried, chosen.assign(tuning="best")], ignore_index=True))
    points = drawing.data
    said = "One run each. 1 line, each over the seeds that all its points have. Ring: chosen by tuning."
    assert said in caption(drawing)
    assert points["mean"].tolist() == [3 + math.log(lr / 3e-3) ** 2 for lr in RATES]
    assert points["role"].tolist() == ["", "best", ""]


def test_an_outlier_does_not_take_the_axis_and_rings_lie_side_by_side():
    """Six losses of 3 to 3.2 and one of 30."""
    losses = {1e-3: 3.2, 2e-3: 3.1, 3e-3: 3.0, 1e-2: 3.1, 2e-2: 3.2, 4e-2: 30.0}
    drawing = by_rate(made({"depth_scale": ["none", "lns"], "lr": [*losses]}, lambda c: {"val_loss": losses[c.lr]}))
    axis = drawing.page().axes[0]
    assert axis.get_ylim()[1] < 4 and "Triangle (2): above the axis." in caption(drawing)
    (rings,) = (marks.get_offsets() for marks in axis.collections if marks.get_sizes() == [80])
    assert len(rings) == 2 and rings[0][0] != rings[1][0] and rings[0][1] == rings[1][1]
