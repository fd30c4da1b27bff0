"""Outcomes against depth: settings by name, mean and interval over seeds, no means over surviving seeds only."""

import math

import numpy as np
import pytest
from support.runs_frame import labelled_grid

from sparsedepth.plots.depth import by_depth
from sparsedepth.plots.page import NothingToDraw, lay_out
from sparsedepth.quantities import axis_label


def summary(config):
    gain = 0.5 if config.depth_scale == "lns" else 0.0
    loss = 3.0 - gain * math.log2(config.n_layers / 4) + 0.1 * config.seed
    return {"val_loss": loss, "needed_layers": config.n_layers / 2, "residual_variance_last": 10.0**config.seed}


RUNS = labelled_grid({"n_layers": [4, 8], "depth_scale": ["none", "lns"], "seed": [0, 1, 2]}, summary)


def page(runs):
    return by_depth(runs).page()


def caption(runs):
    return " ".join(page(runs).get_supxlabel().split())


def test_means_and_intervals_over_seeds():
    points = by_depth(RUNS).data
    assert list(dict.fromkeys(points["setting"])) == ["baseline", "depth_scale=lns"]
    assert list(dict.fromkeys(points["panel"])) == ["val_loss", "needed_layers", "residual_variance_last"]
    losses = points[points["panel"] == "val_loss"].set_index(["setting", "x"])
    assert losses["mean"].tolist() == pytest.approx([3.1, 3.1, 3.1, 2.6])
    half = 4.302653 * 0.1 / math.sqrt(3)  # t(2, 0.975) s / sqrt(n)
    assert losses.loc[("depth_scale=lns", 8), ["lo", "hi"]].tolist() == pytest.approx(
        [2.6 - half, 2.6 + half], abs=1e-6
    )
    variance = points[points["panel"] == "residual_variance_last"].iloc[0]  # 1, 10, 100
    spread = math.exp(4.302653 * math.log(10) / math.sqrt(3))
    assert [variance["mean"], variance["lo"], variance["hi"]] == pytest.approx([10, 10 / spread, 10 * spread], rel=1e-5)


def test_a_caption_tells_of_the_panels_that_are_drawn():
    alone = " ".join(by_depth(RUNS).of_panels(["val_loss"]).page().get_supxlabel().split())
    for told in ("Dotted: every block is needed.", "Geometric means on logarithmic axes."):
        assert told in caption(RUNS) and told not in alone


def test_intervals_are_cut_at_the_range():
    one_needs_all = RUNS.assign(needed_layers=np.where(RUNS["seed"] == 0, 4.3, 0.3))  # mean 4.9/3, half-width 5.7
    points = by_depth(one_needs_all).data
    needed = points[points["panel"] == "needed_layers"]
    half = 4 / 3 * 4.302653
    assert needed["lo"].tolist() == [0] * 4
    assert needed["hi"].tolist() == pytest.approx([min(4.9 / 3 + half, depth) for depth in needed["x"]], rel=1e-5)


def test_a_setting_at_one_depth_and_a_diverged_seed_have_no_point():
    runs = RUNS.copy()
    runs.loc[(runs["depth_scale"] == "lns") & (runs["n_layers"] == 8) & (runs["seed"] == 1), "outcome"] = "diverged"
    assert set(by_depth(runs).data["setting"]) == {"baseline"}
    assert "Not shown: 1 setting of one depth. Not shown: 1 configuration with a diverged seed." in caption(runs)
    with pytest.raises(NothingToDraw, match="no setting was run at two depths"):
        by_depth(RUNS[RUNS["n_layers"] == 4])


def test_the_page_has_a_panel_per_quantity_with_labels_that_are_right():
    runs = RUNS.assign(solved_difficulty=RUNS["n_layers"] + RUNS["seed"])
    drawn = page(runs)
    names = ["val_loss", "needed_layers", "solved_difficulty", "residual_variance_last"]
    assert [axis.get_ylabel() for axis in drawn.axes] == [axis_label(name) for name in names]
    assert axis_label("needed_layers") == "needed layers"  # without '(layer)'
    assert [text.get_text() for text in drawn.axes[0].get_xticklabels()] == ["4", "8"]
    drawn.draw_without_rendering()
    low, high = drawn.axes[3].get_ylim()  # means alike, intervals over decades
    assert sum(low < tick < high for tick in drawn.axes[3].get_yticks()) >= 3
    low, high = drawn.axes[1].get_ylim()
    assert low < 2 and high > 8 and "Dotted: every block is needed" in caption(RUNS)  # the diagonal, whole
    few = RUNS.assign(needed_layers=np.where(RUNS["n_layers"] == 8, 2.0, 1.0) + 0.1 * RUNS["seed"])
    axis = page(few).axes[1]
    assert axis.get_ylim()[1] < 4 and len(axis.get_lines()) == 2 and "Dotted" not in caption(few)
    assert "Points of one x stand side by side." in caption(RUNS)


def test_the_caption_warns_of_variance_at_unequal_lr():
    assert "which also changes" not in caption(RUNS)
    tuned = RUNS.assign(lr=np.where(RUNS["depth_scale"] == "lns", 6e-3, 1.5e-3))
    assert "lr is 0.0015 to 0.006, which also changes residual variance" in caption(tuned)


def test_a_degenerate_score_is_not_drawn_but_named():
    """Of a solved task usefulness is relative to too small a loss; the blocks needed are drawn in its place."""
    solved = RUNS.assign(val_loss=0.001, usefulness_loss_increase=1e4 + RUNS["seed"])
    needed = solved.assign(needed_layers=RUNS["n_layers"] / 2 + RUNS["seed"])
    assert "needed_layers" in set(by_depth(needed).data["panel"]) and "egenerate" not in caption(needed)
    without = solved.assign(needed_layers=None)
    assert "usefulness_loss_increase" not in set(by_depth(without).data["panel"])
    assert "usefulness_loss_increase (it is rel" in caption(without)


def test_of_many_settings_those_of_the_most_depths_and_the_lowest_loss_are_drawn():
    """30 settings at two depths, three of them at a third; the panels keep their room below the long legend."""
    decays = [0.01 * i for i in range(30)]
    runs = labelled_grid({"n_layers": [4, 8, 16], "weight_decay": decays}, lambda c: {"val_loss": 3 - c.weight_decay})
    runs = runs[(runs["n_layers"] < 16) | (runs["weight_decay"] < 0.025)]
    points = by_depth(runs).data
    lowest = [f"weight_decay={decay:g}" for decay in decays[-7:]]
    assert list(dict.fromkeys(points["setting"])) == ["baseline", "weight_decay=0.01", "weight_decay=0.02", *lowest]
    assert "Not shown: 20 further settings" in caption(runs)
    drawn = page(runs)
    lay_out(drawn)
    (panel,), (legend,) = drawn.axes, drawn.legends
    assert panel.get_window_extent().y1 < legend.get_window_extent().y0
    assert panel.get_window_extent().height > 1.5 * drawn.dpi
