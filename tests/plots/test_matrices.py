"""Matrices side by side: means over the deepest runs of a setting, one scale, missing pairs stay missing."""

import numpy as np
import pandas as pd
from support.runs_frame import grid

from sparsedepth.plots.matrices import MOST, mean_matrices, page_of_matrices


def pairs_of(runs, value):
    return pd.DataFrame(
        [
            (run.run_id, step, 1, other, "causal_effect", value(run) + other - 10 * (step == 1))
            for run in runs.itertuples()
            for step in (1, 9)
            for other in range(2, run.n_layers + 1)
        ],
        columns=["run_id", "step", "layer", "other_layer", "metric", "value"],
    )


def test_means_over_seeds_of_the_deepest_at_the_last_step():
    axes = {"n_layers": [2, 4], "weight_decay": [0.0, 0.3], "n_kv_heads": [4, 1], "seed": [0, 1]}
    runs = grid(axes, lambda config: {"val_loss": 3.0})
    means = mean_matrices(runs, pairs_of(runs, lambda run: run.seed + 100 * run.weight_decay))
    assert means.n_layers == 4 and means.settings == ("baseline", "weight_decay=0.3", "n_kv_heads=1")
    baseline, decayed = means.matrix("causal_effect", "baseline"), means.matrix("causal_effect", "weight_decay=0.3")
    assert baseline[4, 1] == 4.5 and decayed[4, 1] == 34.5
    assert np.isnan(baseline[4, 2]) and np.isnan(baseline[1, 1])
    assert set(means.values["n_runs"]) == {2}
    images = [axis.get_images()[1] for axis in page_of_matrices(means).axes[:3]]
    assert len({image.norm for image in images}) == 1


def test_more_settings_than_fit_are_counted():
    runs = grid({"weight_decay": [i / 10 for i in range(9)]}, lambda config: {"val_loss": 3.0}, n_layers=3)
    means = mean_matrices(runs, pairs_of(runs, lambda run: 1.0))
    assert len(means.settings) == MOST
    assert f"Not shown: {9 - MOST} further settings" in page_of_matrices(means).get_supxlabel()
