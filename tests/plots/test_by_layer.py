"""Lines by layer: last step, baseline runs, mean and range over seeds."""

import pandas as pd
import pytest
from matplotlib.figure import Figure
from support.runs_frame import grid

from sparsedepth.plots.by_layer import METRICS, by_layer, chosen_runs, draw_by_layer

AXES = {"n_layers": [2, 4], "weight_decay": [0.0, 0.3], "seed": [0, 1]}


def runs_and_layers():
    runs = grid(AXES, lambda config: {"val_loss": 3.0})
    rows = []
    for run_id, n_layers, decay, seed in runs[["run_id", "n_layers", "weight_decay", "seed"]].itertuples(index=False):
        for layer in range(n_layers + 1):
            for step in (10, 20):
                value = float(layer + step + seed + 100 * (decay > 0))
                rows.append((run_id, step, layer, "residual_variance", value))
            effect = None if layer == n_layers else 0.5
            rows.append((run_id, 20, layer, "causal_effect", effect))
            rows.append((run_id, 20, layer, "affine_loss_increase", -0.01 * layer))
            rows.append((run_id, 20, layer, "weight_sparsity@0.001", 0.1))
    return runs, pd.DataFrame(rows, columns=["run_id", "step", "layer", "metric", "value"])


def test_mean_and_range_over_the_seeds_of_the_baseline_at_the_last_step():
    by_depth = by_layer(*runs_and_layers())
    variance = by_depth.layers[(by_depth.layers["metric"] == "residual_variance") & (by_depth.layers["n_layers"] == 4)]
    # layer + 20 + seed, seeds 0 and 1, weight_decay 0; the embedding (layer 0) is no block
    assert variance[["layer", "position", "mean", "low", "high", "n_runs"]].to_numpy().tolist() == [
        [1, 0.25, 21.5, 21, 22, 2],
        [2, 0.50, 22.5, 22, 23, 2],
        [3, 0.75, 23.5, 23, 24, 2],
        [4, 1.00, 24.5, 24, 25, 2],
    ]
    assert by_depth.thresholds == (0.1,)
    assert by_depth.dropped == 0
    effects = by_depth.layers[(by_depth.layers["metric"] == "causal_effect") & (by_depth.layers["n_layers"] == 4)]
    assert list(effects["layer"]) == [1, 2, 3]  # the last layer has no later one


def test_null_and_unplottable_values_are_counted():
    runs, layers = runs_and_layers()
    chosen = runs.loc[(runs["weight_decay"] == 0) & (runs["n_layers"] == 4) & (runs["seed"] == 0), "run_id"].item()
    here = (layers["run_id"] == chosen) & (layers["step"] == 20) & (layers["metric"] == "residual_variance")
    layers.loc[here & (layers["layer"] == 1), "value"] = None
    layers.loc[here & (layers["layer"] == 2), "value"] = 0.0
    by_depth = by_layer(runs, layers)
    assert by_depth.dropped == 2
    rest = by_depth.layers[(by_depth.layers["metric"] == "residual_variance") & (by_depth.layers["n_layers"] == 4)]
    assert list(rest["n_runs"]) == [1, 1, 2, 2]


def test_without_a_baseline_the_closest_runs_are_drawn():
    runs = grid({"n_layers": [2, 4], "weight_decay": [0.0, 0.3], "n_kv_heads": [4, 1]}, lambda config: {})
    keep = (runs["n_layers"] == 4) | ~((runs["weight_decay"] == 0) & (runs["n_kv_heads"] == 4))
    chosen = chosen_runs(runs[keep])
    assert sorted(zip(chosen["n_layers"], chosen["weight_decay"], chosen["n_kv_heads"], strict=True)) == [
        (2, 0.0, 1),
        (2, 0.3, 4),
        (4, 0.0, 4),
    ]


def test_the_lines_carry_the_means():
    figure = Figure()
    axes = figure.subplots(1, 3)
    draw_by_layer(by_layer(*runs_and_layers()), axes)
    lines = [list(line.get_ydata()) for line in axes[0].get_lines() if len(line.get_ydata()) in (2, 4)]
    assert lines == [[21.5, 22.5], [21.5, 22.5, 23.5, 24.5]]
    assert (axes[0].get_yscale(), axes[2].get_yscale()) == ("log", "symlog")
    assert axes[0].get_title(loc="left") + axes[0].get_title() == "mean and range of 2 runs per depth"


def test_a_metric_without_values_by_layer_has_no_panel():
    runs, layers = runs_and_layers()
    assert by_layer(runs, layers[:0]).metrics == []
    assert by_layer(runs, layers[layers["metric"] != "causal_effect"]).metrics == [METRICS[0], METRICS[2]]


def test_the_lr_of_the_lines_is_named():
    """Depths may have been tuned apart, and lr moves the variance that is shown."""
    runs, layers = runs_and_layers()
    assert by_layer(runs.assign(lr=0.003), layers).lr_text == "lr 0.003"
    tuned = runs.assign(lr=[0.003 if n_layers == 2 else 0.001 for n_layers in runs["n_layers"]])
    assert by_layer(tuned, layers).lr_text == "lr 0.003 at 2 layers; 0.001 at 4 layers"


@pytest.mark.parametrize("outcome", ["diverged"])
def test_diverged_runs_have_no_profile(outcome):
    runs, layers = runs_and_layers()
    runs.loc[runs["n_layers"] == 4, "outcome"] = outcome
    assert set(by_layer(runs, layers).layers["n_layers"]) == {2}


def test_a_search_shows_the_proposal_with_the_lowest_loss():
    runs, layers = runs_and_layers()
    runs["val_loss"] = range(len(runs), 0, -1)
    by_depth = by_layer(runs, layers, is_search=True)
    assert set(by_depth.layers["n_runs"]) == {1} and set(by_depth.layers["n_layers"]) == set(runs["n_layers"])


def test_a_solved_task_draws_the_loss_added_not_its_share_of_the_loss():
    runs, layers = runs_and_layers()
    added = layers[layers["metric"] == "affine_loss_increase"].assign(metric="affine_loss_added", value=0.2)
    both = pd.concat([layers, added], ignore_index=True)
    assert by_layer(runs, both).metrics == list(METRICS) and not by_layer(runs, both).degenerate
    solved = runs.assign(val_loss=0.001)
    by_depth = by_layer(solved, both)
    assert by_depth.metrics == ["residual_variance", "causal_effect", "affine_loss_added"] and not by_depth.absent
    assert "Drawn in place of affine_loss_increase (it is relative to a loss below 0.1" in by_depth.degenerate
    alone = by_layer(solved, layers)
    assert alone.metrics == list(METRICS) and alone.degenerate.startswith(" No evidence (it is relative to a loss")
