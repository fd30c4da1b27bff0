"""The data of the chain are the numbers of the rows; rank correlations by hand; what is left out is counted."""

import numpy as np
import pandas as pd
from support.runs_frame import labelled_grid

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.chain import chain_evidence
from sparsedepth.plots.by_setting import BY_DEPTH
from sparsedepth.plots.points import LINKS, correlations, front, regression
from sparsedepth.plots.style import kind_markers, without_outliers
from sparsedepth.quantities import axis_label
from sparsedepth.words.captions import CHANGES_VARIANCE

AXES = {"n_layers": [12, 24], "weight_decay": [0.0, 0.3], "n_kv_heads": [4, 1], "seed": [0, 1]}


def summary(config):
    sparsity = 0.1 + config.weight_decay + 0.01 * config.seed
    variance = config.n_layers / sparsity
    return {
        "weight_sparsity": sparsity,
        "attention_sparsity_rel": 0.5 - 0.1 * config.n_kv_heads,
        "residual_variance_last": variance,
        "usefulness_loss_increase": 1 / variance,
        "causal_score": 0.3 + 0.001 * config.seed,
        "val_loss": 2 + variance / 100,
    }


RUNS = labelled_grid(AXES, summary)


def links_of(page):
    """The quantities of each panel, by their labels."""
    names = {axis_label(name): name for link in LINKS for name in link}
    return [(names[axis.get_xlabel()], names[axis.get_ylabel()]) for axis in page.axes]


def test_points_hold_the_numbers_of_the_runs():
    chain = correlations(RUNS)
    merged = chain.data.merge(RUNS, on="run_id", suffixes=("", "_run"))
    assert len(merged) == 16
    for name in ("weight_sparsity", "residual_variance_last", "usefulness_loss_increase", "val_loss"):
        assert list(merged[name]) == list(merged[f"{name}_run"])
    names = ["baseline", "n_kv_heads=1", "weight_decay=0.3", "n_kv_heads=1, weight_decay=0.3"]
    assert list(kind_markers(chain.data["kind"])) == names


def test_a_panel_has_the_correlations_and_intervals_of_effects():
    """Eight settings: each panel's title has what `effects --part chain` says of the link."""
    settings = labelled_grid({**AXES, "depth_scale": ["none", "lns"]}, lambda config: noisy(summary(config), config))
    page = correlations(settings).page()
    cells = cells_of(settings.drop(columns="setting"), "val_loss")
    said = {(one.within.cause, one.within.effect): one.links[:2] for one in chain_evidence(cells)}
    for axis, pair in zip(page.axes, links_of(page), strict=True):
        (rho, lo, hi), within = ((one.rho, one.lo, one.hi) for one in said[pair])
        assert f"pooled: ρ = {rho:+.2f} [{lo:+.2f}, {hi:+.2f}], n = 32" in axis.get_title()
        assert "within depth: ρ = {:+.2f} [{:+.2f}, {:+.2f}], n = 32".format(*within) in axis.get_title()


def test_without_an_interval_the_caption_says_from_when_on():
    page = correlations(RUNS.query("weight_decay == 0 and depth_scale == 'none'")).page()
    assert "interval" not in "".join(axis.get_title() for axis in page.axes)
    assert "from six settings on with its [95% interval over them]" in " ".join(page.get_supxlabel().split())


def noisy(values, config):
    """Without two quantities that agree in rank."""
    rng = np.random.default_rng(
        [config.n_layers, int(10 * config.weight_decay), config.n_kv_heads, len(config.depth_scale)]
    )
    return {name: value * rng.uniform(0.5, 1.5) for name, value in values.items()}


def test_a_regression_line_stays_within_the_data():
    x = pd.Series([0.0, 1.0, 2.0, 3.0])
    ends, fitted = regression(x, pd.Series([0.0, 0.0, 0.0, 1.0]), False, False)
    assert ends.max() <= 3 and fitted.min() >= -1e-9 and fitted.max() <= 1  # the line is below 0 at x = 0
    assert regression(x[:3], x[:3], False, False) is None and regression(x, x * 0, False, False) is None


def test_runs_that_cannot_be_shown_are_dropped_and_counted():
    runs = RUNS.copy()
    runs.loc[0, "usefulness_loss_increase"] = None
    runs.loc[1, "residual_variance_last"] = 0.0  # no place on a logarithmic axis
    runs.loc[2, "outcome"] = "diverged"
    chain = correlations(runs)
    page = chain.page()
    assert len(chain.data) == 15 and page.get_supxlabel().startswith("15 finished runs, 1 diverged (not shown).")
    axes = page.axes
    assert links_of(page)[1] == ("residual_variance_last", "usefulness_loss_increase")
    assert "not shown: 1 of 15 (NULL)" in axes[0].get_title()  # of the first link
    assert sum(len(points.get_offsets()) for points in axes[1].collections) == 13
    title = axes[1].get_title()
    assert "pooled: ρ = -1.00" in title and "n = 13" in title and "not shown: 2 of 15 (NULL)" in title
    assert (axes[1].get_xscale(), axes[0].get_yscale(), axes[2].get_xscale()) == ("log", "log", "linear")


def test_a_degenerate_score_has_no_line_and_no_rho():
    """The interval of every run's usefulness holds 0."""
    page = correlations(RUNS.assign(usefulness_loss_increase_lo=-1.0, usefulness_loss_increase_hi=1.0)).page()
    axis = page.axes[links_of(page).index(("residual_variance_last", "usefulness_loss_increase"))]
    assert axis.get_title() == "degenerate, so no evidence" and not axis.get_lines() and axis.collections


def test_a_value_that_is_the_same_everywhere_has_no_panel_and_is_named():
    page = correlations(RUNS.assign(causal_score=0.3)).page()
    assert links_of(page) == [link for link in LINKS if "causal_score" not in link]
    assert "Not drawn, as it is the same everywhere: causal_score." in " ".join(page.get_supxlabel().split())


def test_one_outlier_does_not_flatten_the_others_and_is_counted():
    """Usefulness is 0 to 1 in 15 runs and 1000 in one; four of them are a group."""
    values = np.linspace(0, 1, 16)
    for n in (1, 4):
        page = correlations(RUNS.assign(usefulness_loss_increase=np.where(np.arange(16) < n, 1000.0, values))).page()
        axis = page.axes[links_of(page).index(("residual_variance_last", "usefulness_loss_increase"))]
        assert (axis.get_ylim()[1] <= 1.05) == (n == 1)
        assert ("1 point beyond the axes" in axis.get_title()) == (n == 1)
        assert sum(len(dots.get_offsets()) for dots in axis.collections) == 16
    for values in ([1.0, 1, 1, 5], [1.0, 2, 3]):  # three equal ones have no scale; none is far
        assert without_outliers(pd.Series(values)).tolist() == values


def test_combinations_of_fields_are_named_as_far_as_there_are_shapes():
    """In the same words in both figures; many settings of one field, and of several, have one shape."""
    runs = labelled_grid({"weight_decay": [0.01 * i for i in range(30)]}, summary)
    assert set(correlations(runs).data["kind"]) == {"baseline", "weight_decay"}
    runs = labelled_grid({"weight_decay,n_kv_heads": [(0.0, 2), (0.3, 1)]}, summary)
    kinds = ["baseline", "n_kv_heads=1, weight_decay=0.3"]
    assert list(correlations(runs).data["kind"]) == kinds
    assert sorted(front(runs.assign(val_loss=[3.0, 2.0], train_flops=1e9)).data["kind"]) == kinds
    pairs = [(0.0, 4), (0.3, 1), (0.1, 2)]
    runs = labelled_grid({"weight_decay,n_kv_heads": pairs}, summary)
    names = ["n_kv_heads=1, weight_decay=0.3", "n_kv_heads=2, weight_decay=0.1"]
    assert list(correlations(runs).data["kind"]) == ["baseline", *names]
    many = labelled_grid({"weight_decay,n_kv_heads": [(0.0, 4), *((0.01 * i, 1) for i in range(1, 15))]}, summary)
    assert list(correlations(many).data["kind"]) == ["baseline", *["several fields"] * 14]
    assert list(correlations(runs, is_search=True).data["kind"]) == ["proposal"] * 3


def test_quantities_without_values_have_no_panel_and_are_named():
    chain = correlations(RUNS.assign(causal_score=np.nan, lr=[0.001, 0.003] * 8))
    page = chain.page()
    assert links_of(page) == [link for link in LINKS if "causal_score" not in link]
    assert all(axis.collections for axis in page.axes)
    text = " ".join(page.get_supxlabel().split())
    assert f"lr is 0.001 to 0.003{CHANGES_VARIANCE}. Not measured: causal_score." in text


def test_everything_drawn_has_a_label():
    names = {name for panel in LINKS for name in panel} | set(BY_DEPTH)
    labels = {name: axis_label(name) for name in names}
    assert len(set(labels.values())) == len(names) and all("_" not in label for label in labels.values())
    assert labels["weight_sparsity"] == "weight sparsity\n(share of weights)"
