"""Curves over the learning rate: one per configuration, best and edge, no means over surviving seeds only."""

import math

import numpy as np
import pandas as pd
from support.runs_frame import grid

from sparsedepth.plots.learning_rate import curves, page_of_curves

RATES = [1e-3, 3e-3, 1e-2]


def numbers(runs):
    """Each cell's setting is its depth_scale."""
    return curves(runs, dict(zip(runs["cell_id"], runs["depth_scale"].replace("none", "baseline"), strict=True)))


def summary(config):
    best = 3e-3 if config.depth_scale == "none" else 1e-2
    return {"val_loss": 3 + math.log(config.lr / best) ** 2 + 0.1 * config.seed}


def test_best_and_edge():
    runs = grid({"depth_scale": ["none", "lns"], "lr": RATES, "seed": [0, 1]}, summary, n_layers=4)
    points = numbers(runs).points
    assert points["configuration"].nunique() == 2 and set(points["n_seeds"]) == {2}
    roles = {(row.setting, row.lr): row.role for row in points.itertuples() if row.role}
    assert roles == {("baseline", 3e-3): "best", ("lns", 1e-2): "edge"}
    assert points.loc[points["role"] == "best", "val_loss"].tolist() == [3.05]
    assert marks_explained(runs) == ["lowest", "at the end of the grid"]
    assert marks_explained(runs[runs["depth_scale"] == "none"]) == ["lowest"]


def marks_explained(runs):
    (legend,) = page_of_curves(numbers(runs)).legends
    return [text.get_text() for text in legend.get_texts()][runs["depth_scale"].nunique() :]


def test_a_diverged_seed_leaves_no_point():
    runs = grid({"lr": RATES, "seed": [0, 1]}, summary, n_layers=4)
    runs.loc[(runs["lr"] == 1e-2) & (runs["seed"] == 1), "outcome"] = "diverged"
    by_lr = numbers(runs)
    assert np.isnan(by_lr.points.set_index("lr").loc[1e-2, "val_loss"])
    assert "1 value where a seed diverged" in " ".join(page_of_curves(by_lr).get_supxlabel().split())


def test_one_value_each_is_no_curve():
    assert numbers(grid({"depth_scale": ["none", "lns"]}, summary, n_layers=4)).points.empty


def test_a_line_has_the_seeds_of_all_its_points_and_the_ring_the_chosen_lr():
    """Tuning chose 3e-3 by seed 0; seeds 5 and 6, of the chosen value alone, are much worse and moved the curve."""
    tried = grid({"lr": RATES, "seed": [0]}, summary, n_layers=4).assign(tuning="rejected")
    tried.loc[tried["lr"] == 3e-3, "tuning"] = "tuning"
    chosen = grid({"lr": [3e-3], "seed": [5, 6]}, lambda config: {"val_loss": 9.0}, n_layers=4)
    runs = pd.concat([tried, chosen.assign(tuning="best")], ignore_index=True)
    by_lr, caption = numbers(runs).points, page_of_curves(numbers(runs)).get_supxlabel()
    assert "the 1 seed that all points of a line have. Ring: chosen by tuning, perhaps with more seeds." in " ".join(
        caption.split()
    )
    assert by_lr["val_loss"].tolist() == [summary_of(lr) for lr in RATES] and set(by_lr["n_seeds"]) == {1}
    assert by_lr["role"].tolist() == ["", "best", ""]


def summary_of(lr):
    return 3 + math.log(lr / 3e-3) ** 2
