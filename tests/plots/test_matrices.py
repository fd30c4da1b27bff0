"""Matrices side by side: means over the deepest runs of a setting, one scale, missing pairs stay missing."""

import pandas as pd
from support.runs_frame import labelled_grid

from sparsedepth.plots.matrices import MOST, mean_matrices, page_of_matrices


def pairs_of(runs, value):
    return pd.DataFrame(
        [
            (run.run_id, 1, other, "causal_effect", value(run) + other)
            for run in runs.itertuples()
            for other in range(2, run.n_layers + 1)
        ],
        columns=["run_id", "layer", "other_layer", "metric", "value"],
    )


def test_means_over_seeds_of_the_deepest():
    axes = {"n_layers": [2, 4], "weight_decay": [0.0, 0.3], "seed": [0, 1]}
    runs = labelled_grid(axes, lambda config: {"val_loss": 3.0})
    values, notes = mean_matrices(runs, pairs_of(runs, lambda run: run.seed + 100 * run.weight_decay))
    at = values.set_index(["setting", "layer", "other_layer"])["value"]
    assert at["baseline", 1, 4] == 4.5 and at["weight_decay=0.3", 1, 4] == 34.5
    assert set(values["n_runs"]) == {2} and notes == ""
    page = page_of_matrices(values, 4)
    first, second = (axis.collections[1] for axis in page.axes[:2])
    assert first.norm is second.norm and first.get_array().mask[3, 1]
    assert [axis.get_title() for axis in page.axes[:2]] == ["baseline", "weight_decay=0.3"]


def test_more_settings_than_fit_are_counted():
    runs = labelled_grid({"weight_decay": [i / 10 for i in range(9)]}, lambda config: {"val_loss": 3.0}, n_layers=3)
    values, notes = mean_matrices(runs, pairs_of(runs, lambda run: 1.0))
    assert values["setting"].nunique() == MOST and f"Not shown: {9 - MOST} further settings" in notes
