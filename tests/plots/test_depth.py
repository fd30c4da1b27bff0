"""Outcomes against depth: settings by name, mean and interval over seeds, no means over surviving seeds only."""

import itertools
import math

import numpy as np
import pytest
from support.runs_frame import grid

from sparsedepth.plots.depth import by_depth, page_of_depths
from sparsedepth.quantities import axis_label


def summary(config):
    gain = 0.5 if config.depth_scale == "lns" else 0.0
    loss = 3.0 - gain * math.log2(config.n_layers / 4) + 0.1 * config.seed
    return {"val_loss": loss, "needed_layers": config.n_layers / 2, "residual_variance_last": 10.0**config.seed}


RUNS = grid({"n_layers": [4, 8], "depth_scale": ["none", "lns"], "seed": [0, 1, 2]}, summary)
WORDS = {row.cell_id: "lns" if row.depth_scale == "lns" else "baseline" for row in RUNS.itertuples()}


def test_means_and_intervals_over_seeds():
    points = by_depth(RUNS, WORDS).points
    assert list(dict.fromkeys(points["setting"])) == ["baseline", "lns"]
    assert list(dict.fromkeys(points["quantity"])) == ["val_loss", "needed_layers", "residual_variance_last"]
    losses = points[points["quantity"] == "val_loss"].set_index(["setting", "n_layers"])
    assert losses["mean"].tolist() == pytest.approx([3.1, 3.1, 3.1, 2.6])
    half = 4.302653 * 0.1 / math.sqrt(3)  # t(2, 0.975) s / sqrt(n)
    assert losses.loc[("lns", 8), ["lo", "hi"]].tolist() == pytest.approx([2.6 - half, 2.6 + half], abs=1e-6)
    assert set(losses["n_seeds"]) == {3}
    variance = points[points["quantity"] == "residual_variance_last"].iloc[0]  # 1, 10, 100
    spread = math.exp(4.302653 * math.log(10) / math.sqrt(3))
    assert [variance["mean"], variance["lo"], variance["hi"]] == pytest.approx([10, 10 / spread, 10 * spread], rel=1e-5)


def test_intervals_are_cut_at_the_range_and_points_stay_near_their_depth():
    one_needs_all = RUNS.assign(needed_layers=np.where(RUNS["seed"] == 0, 4.0, 0.0))  # mean 4/3, half-width 5.7
    data = by_depth(one_needs_all, WORDS)
    needed = data.points[data.points["quantity"] == "needed_layers"]
    assert needed["lo"].tolist() == [0] * 4
    # 7.1 blocks are more than 4 layers have, and fewer than 8
    half = 4 / 3 * 4.302653
    assert needed["hi"].tolist() == pytest.approx([min(4 / 3 + half, depth) for depth in needed["n_layers"]])
    panel = page_of_depths(data).axes[0]
    places = [x for line in panel.get_lines() for x in line.get_xdata()]
    assert max(abs(math.log2(x / 4)) for x in places if x < 6) < 0.05  # of the doubling that the axis spans


def test_a_setting_at_one_depth_and_a_diverged_seed_have_no_point():
    runs = RUNS.copy()
    runs.loc[(runs["depth_scale"] == "lns") & (runs["n_layers"] == 8) & (runs["seed"] == 1), "outcome"] = "diverged"
    data = by_depth(runs, WORDS)
    assert set(data.points["setting"]) == {"baseline"} and data.n_diverged == 1
    assert data.n_single == 1 and "Not shown: 1 setting of one depth" in " ".join(
        page_of_depths(data).get_supxlabel().split()
    )
    assert by_depth(RUNS[RUNS["n_layers"] == 4], WORDS).points.empty


def test_the_page_has_a_panel_per_quantity_and_whole_depths():
    runs = RUNS.assign(needed_layers=None)
    page = page_of_depths(by_depth(runs, WORDS))
    labels = [axis.get_ylabel() for axis in page.axes]
    assert labels == [axis_label("val_loss"), axis_label("residual_variance_last")]
    assert [text.get_text() for text in page.axes[0].get_xticklabels()] == ["4", "8"]
    page.draw_without_rendering()
    variance = page.axes[1]  # means alike, intervals over decades
    assert sum(low < tick < high for low, high in [variance.get_ylim()] for tick in variance.get_yticks()) >= 3
    two = by_depth(RUNS[RUNS["seed"] < 2], WORDS)
    assert np.isnan(two.points["lo"]).all()
    assert "every block is needed" in " ".join(page_of_depths(two).get_supxlabel().split())


def test_runs_of_a_task_have_a_panel_of_the_solved_difficulty():
    runs = RUNS.assign(solved_difficulty=RUNS["n_layers"] + RUNS["seed"])
    data = by_depth(runs, WORDS)
    solved = data.points[data.points["quantity"] == "solved_difficulty"]
    assert solved["mean"].tolist() == [5, 9, 5, 9]
    assert solved["lo"].iloc[0] == pytest.approx(5 - 4.302653 / math.sqrt(3), abs=1e-6)
    names = ["val_loss", "needed_layers", "solved_difficulty", "residual_variance_last"]
    assert [axis.get_ylabel() for axis in page_of_depths(data).axes] == [axis_label(name) for name in names]


def test_a_variance_of_0_leaves_a_logarithmic_axis_from_the_lowest_positive_value():
    """Of 0, 10 and 100 the interval of the mean begins at 0, which no logarithmic axis has."""
    data = by_depth(RUNS.assign(residual_variance_last=np.where(RUNS["seed"] == 0, 0.0, 10.0 ** RUNS["seed"])), WORDS)
    variance = data.points[data.points["quantity"] == "residual_variance_last"]
    assert variance["lo"].tolist() == [0] * 4 and variance["mean"].tolist() == pytest.approx([110 / 3] * 4)
    page = page_of_depths(data)
    page.draw_without_rendering()
    assert page.axes[2].get_yscale() == "log" and page.axes[2].get_ylim()[0] > 0
    assert "cut at the end of the range" in " ".join(page.get_supxlabel().split())


def test_the_caption_warns_of_variance_at_unequal_lr():
    tuned = RUNS.assign(lr=np.where(RUNS["depth_scale"] == "lns", 6e-3, 1.5e-3))
    captions = [
        "".join(text.get_text() for text in page_of_depths(by_depth(runs, WORDS)).texts) for runs in (RUNS, tuned)
    ]
    assert "which also changes" not in captions[0]
    assert "lr is 0.0015 to 0.006, which also changes residual variance" in captions[1].replace("\n", " ")


def test_only_a_score_that_is_drawn_is_called_degenerate():
    """Of a solved task usefulness is relative to too small a loss; the figure draws the blocks needed, in its place."""
    needed = RUNS["n_layers"] / 2 + RUNS["seed"]
    solved = RUNS.assign(val_loss=0.001, usefulness_loss_increase=1e4 + RUNS["seed"], needed_layers=needed)
    assert "Degenerate" not in page_of_depths(by_depth(solved, WORDS)).get_supxlabel()
    relative = page_of_depths(by_depth(solved.assign(needed_layers=None), WORDS)).get_supxlabel()
    assert "usefulness_loss_increase" in relative


def test_of_many_settings_those_of_the_most_depths_and_the_lowest_loss_are_drawn():
    """30 settings at two depths, three of them at a third; the panels keep their room below the long legend."""
    decays = [0.01 * i for i in range(30)]
    runs = grid({"n_layers": [4, 8, 16], "weight_decay": decays}, lambda c: {"val_loss": 3 - c.weight_decay})
    runs = runs[(runs["n_layers"] < 16) | (runs["weight_decay"] < 0.025)]
    names = {row.cell_id: f"weight_decay={row.weight_decay:g}" for row in runs.itertuples()}
    data = by_depth(runs, {cell: "baseline" if name == "weight_decay=0" else name for cell, name in names.items()})
    lowest = [f"weight_decay={decay:g}" for decay in decays[-7:]]
    assert list(dict.fromkeys(data.points["setting"])) == [
        "baseline",
        "weight_decay=0.01",
        "weight_decay=0.02",
        *lowest,
    ]
    page = page_of_depths(data)
    page.draw_without_rendering()
    assert "Not shown: 20 further settings" in " ".join(page.get_supxlabel().split())
    (panel,), (legend,) = page.axes, page.legends
    assert panel.get_window_extent().y1 < legend.get_window_extent().y0
    assert panel.get_window_extent().height > 1.5 * page.dpi


def test_labels_of_depths_do_not_overlap():
    depths = [3, 7, 12, 13, 15, 16, 18, 23, 27, 36, 45, 71, 80]
    runs = grid({"n_layers": depths}, lambda config: {"val_loss": 3.0})
    page = page_of_depths(by_depth(runs, dict.fromkeys(runs["cell_id"], "baseline")))
    page.draw_without_rendering()
    labels = page.axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == ["3", "7", "13", "18", "27", "45", "80"]
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
