"""The data of the chain figure are the numbers of the rows, and count what is left out."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from support.runs_frame import grid

from sparsedepth.plots.correlations import PANELS, correlations, draw_correlations
from sparsedepth.plots.pareto import front
from sparsedepth.plots.style import folder_fills, knob_markers

AXES = {"n_layers": [12, 24], "weight_decay": [0.0, 0.3], "n_kv_heads": [4, 1], "seed": [0, 1]}


def summary(config):
    sparsity = 0.1 + config.weight_decay + 0.01 * config.seed
    variance = config.n_layers / sparsity
    return {
        "weight_sparsity": sparsity,
        "attention_sparsity_rel": 0.5 - 0.1 * config.n_kv_heads,
        "residual_variance_last": variance,
        "usefulness_loss_increase": 1 / variance,
        "causal_score": 0.3,
        "val_loss": 2 + variance / 100,
    }


def test_points_hold_the_numbers_of_the_runs():
    runs = grid(AXES, summary)
    chain = correlations(runs)
    assert len(chain.points) == 16
    merged = chain.points.merge(runs, on="run_id", suffixes=("", "_run"))
    for name in ("weight_sparsity", "residual_variance_last", "usefulness_loss_increase", "val_loss"):
        assert list(merged[name]) == list(merged[f"{name}_run"])
    assert chain.points["knob"].value_counts().to_dict() == {
        "baseline": 4,
        "weight_decay=0.3": 4,
        "n_kv_heads=1": 4,
        "weight_decay=0.3, n_kv_heads=1": 4,
    }
    names = ["baseline", "n_kv_heads=1", "weight_decay=0.3", "weight_decay=0.3, n_kv_heads=1"]
    assert list(knob_markers(chain.points["knob"])) == names


def test_a_knob_of_several_settings_has_one_shape():
    runs = grid({"weight_decay": [0.0, 0.3, 1.0]}, summary)
    assert list(correlations(runs).points["knob"]) == ["baseline", "weight_decay", "weight_decay"]


def test_every_panel_states_its_correlations():
    chain = correlations(grid(AXES, summary))
    pooled, within = chain.links["residual_variance_last", "usefulness_loss_increase"]
    assert (pooled.scope, within.scope) == ("pooled", "within depth")
    assert (pooled.rho, within.rho) == (pytest.approx(-1.0), pytest.approx(-1.0))
    assert (pooled.n_runs, pooled.n_units) == (16, 4)
    assert chain.links["causal_score", "val_loss"][0].rho is None  # the causal score is constant


def test_one_depth_has_no_correlation_within_depth():
    chain = correlations(grid({"weight_decay": [0.0, 0.3]}, summary))
    assert all(len(links) == 1 for links in chain.links.values())


def test_runs_that_cannot_be_shown_are_dropped_and_counted():
    runs = grid(AXES, summary)
    runs.loc[0, "usefulness_loss_increase"] = None
    runs.loc[1, "residual_variance_last"] = 0.0  # no place on a logarithmic axis
    runs.loc[2, "outcome"] = "diverged"
    chain = correlations(runs)
    assert (len(chain.points), chain.n_diverged) == (15, 1)
    assert chain.dropped["weight_sparsity", "residual_variance_last"] == 1
    assert chain.dropped["residual_variance_last", "usefulness_loss_increase"] == 2
    assert chain.dropped["causal_score", "val_loss"] == 0
    assert chain.links["residual_variance_last", "usefulness_loss_increase"][0].n_runs == 13


def test_one_combination_of_several_fields_is_named_and_more_are_not():
    """In the same words in both figures."""
    runs = grid({"weight_decay,n_kv_heads": [(0.0, 2), (0.3, 1)]}, summary)
    kinds = ["baseline", "weight_decay=0.3, n_kv_heads=1"]
    assert list(correlations(runs).points["knob"]) == kinds
    assert sorted(front(runs.assign(val_loss=[3.0, 2.0], train_flops=1e9)).cells["kind"]) == kinds

    runs = grid({"weight_decay,lr": [(0.0, 1e-3), (0.3, 5e-4), (0.1, 2e-3)]}, summary)
    kinds = ["baseline", "several fields", "several fields"]
    assert list(correlations(runs).points["knob"]) == kinds
    assert sorted(front(runs.assign(val_loss=[3.0, 2.0, 2.5], train_flops=1e9)).cells["kind"]) == kinds
    assert list(correlations(runs, is_search=True).points["knob"]) == ["proposal"] * 3


def test_the_drawing_shows_every_point_once():
    runs = grid(AXES, summary)
    runs.loc[0, "usefulness_loss_increase"] = None
    figure = Figure()
    axes = list(figure.subplots(2, 3).ravel())
    draw_correlations(correlations(runs), axes)
    shown = [sum(len(collection.get_offsets()) for collection in axis.collections) for axis in axes]
    assert shown == [15 if "usefulness_loss_increase" in panel else 16 for panel in PANELS]
    assert "not shown: 1 of 16 (NULL)" in axes[1].get_title(loc="left") + axes[1].get_title()
    assert (axes[1].get_xscale(), axes[0].get_yscale(), axes[2].get_xscale()) == ("log", "log", "linear")


def test_the_fill_of_a_point_shows_its_folder():
    runs = grid(AXES, summary)
    runs["folder"] = [f"/somewhere/{'theirs' if i % 4 else 'ours'}/runs/{i}" for i in range(len(runs))]
    chain = correlations(runs)
    assert dict(chain.points["source"].value_counts()) == {"theirs": 12, "ours": 4}
    assert folder_fills(chain.points["source"]) == {"ours": "full", "theirs": "none"}
    figure = Figure()
    axes = list(figure.subplots(2, 3).ravel())
    draw_correlations(chain, axes)
    hollow = [c for c in axes[0].collections if not len(c.get_facecolors())]
    assert sum(len(collection.get_offsets()) for collection in hollow) == 12
    alone = runs.assign(folder=[f"/somewhere/ours/runs/{i}" for i in range(len(runs))])
    assert "source" not in correlations(alone).points


@pytest.mark.parametrize("missing", ["causal_score", "weight_sparsity"])
def test_a_quantity_that_no_run_measured_has_no_panel(missing):
    runs = grid(AXES, summary).assign(**{missing: np.nan})
    chain = correlations(runs)
    assert {panel for panel, n in chain.dropped.items() if n == 16} == {panel for panel in PANELS if missing in panel}
    axes = list(Figure().subplots(1, len(chain.panels)))
    draw_correlations(chain, axes)
    assert chain.panels == [panel for panel in PANELS if missing not in panel]
    assert all(axis.collections for axis in axes)
