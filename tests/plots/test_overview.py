"""The overview: a panel for each measured quantity; lr is named if it differs."""

import pandas as pd
from support.runs_frame import grid

from sparsedepth.plots.overview import data_of, page_of_runs, parts_of
from sparsedepth.plots.style import CHANGES_VARIANCE


def page_of(figure, runs, layers):
    return page_of_runs(runs, *parts_of(figure, runs, layers))


def runs_and_layers(**columns):
    summary = {"val_loss": 3.0, "usefulness_loss_increase": 0.5, "residual_variance_last": 2.0, "causal_score": 0.1}
    runs = grid({"n_layers": [2, 4], "lr": [0.001, 0.003]}, lambda config: summary).assign(**columns)
    rows = [(run_id, 10, 1, "residual_variance", 2.0) for run_id in runs["run_id"]]
    return runs, pd.DataFrame(rows, columns=["run_id", "step", "layer", "metric", "value"])


def test_quantities_without_values_have_no_panel_and_are_named():
    runs, layers = runs_and_layers(causal_score=None)
    page = page_of("overview", runs, layers)
    labels = [(axis.get_xlabel(), axis.get_ylabel()) for axis in page.axes]
    variance = "residual variance, last layer\n(activation²)"
    last = "residual variance (activation²)"
    usefulness = "relative loss increase with a\nblock replaced, mean over blocks"
    assert [label for _, label in labels] == [usefulness, "validation loss (nat/token)", last]
    assert labels[0][0] == variance and all(axis.collections or axis.lines for axis in page.axes)
    text = " ".join(page.get_supxlabel().split())
    absent = "weight_sparsity, attention_sparsity_rel, causal_score, causal_effect, affine_loss_increase"
    assert f"Not measured: {absent}." in text
    assert f"Runs differ in lr (0.001 to 0.003){CHANGES_VARIANCE}." in text


def test_the_caption_by_layer_is_about_the_runs_drawn():
    """Four runs, two of them at the baseline's lr: the others are neither drawn nor counted."""
    runs, layers = runs_and_layers()
    text = page_of("by_layer", runs, layers).get_supxlabel()
    assert "finished runs" not in text and "0.003" not in text and "lr 0.001" in text


def test_the_data_hold_everything_drawn():
    runs, layers = runs_and_layers()
    chain, by_depth = parts_of("overview", runs, layers)
    data = data_of(chain, by_depth)
    assert list(data["run_id"].dropna()) == list(chain.points["run_id"])
    of_layers = data[data["run_id"].isna()]
    assert list(of_layers["mean"]) == list(by_depth.layers["mean"]) == [2.0, 2.0]
    assert len(data_of(chain, None)) == 4 and len(data_of(None, by_depth)) == 2
