"""Accuracy against difficulty: means and intervals over seeds, what is missing, and levels that are true."""

import math

import numpy as np
import pandas as pd
import pytest
from support.made_up_runs import make_run
from support.runs_frame import config_of, grid

from sparsedepth.plots.difficulty import accuracy_by_difficulty, page_of_difficulties
from sparsedepth.plots.draw import FIGURES
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.store.connection import open_store

TRACKING = {"corpus": "task:state_tracking", "seq_len": 16}
RUNS = grid(
    {"n_layers": [2, 4], "depth_scale": ["none", "lns"], "seed": [0, 1, 2]},
    lambda config: {"chance_loss": math.log(5)}, **TRACKING,
)  # fmt: skip
HALF = 4.302653 * 0.1 / math.sqrt(3)  # t(2, 0.975) s / sqrt(n)


def accuracy(run, level):
    """0.8, 0.9, 1 at difficulty 1, 0.4 less at 2; 0.2 less at 2 layers."""
    return 0.8 + 0.1 * run.seed - 0.4 * (level == 2) - 0.2 * (run.n_layers == 2)


def rows_of(runs):
    rows = [(run.run_id, step, level, 50 - 10 * level, accuracy(run, level) if step == 9 else 0.1)
            for run in runs.itertuples() for step in (4, 9) for level in (1, 2)]  # fmt: skip
    return pd.DataFrame(rows, columns=["run_id", "step", "difficulty", "positions", "accuracy"])


def numbers(runs=RUNS, rows=None):
    settings = dict(zip(runs["cell_id"], runs["depth_scale"].replace("none", "baseline"), strict=True))
    return accuracy_by_difficulty(runs, rows_of(runs) if rows is None else rows, settings)


def heights(data):
    """Of the horizontal lines of the first panel."""
    panel = page_of_difficulties(data).axes[0]
    return [line.get_ydata()[0] for line in panel.get_lines() if list(line.get_xdata()) == [0, 1]]


def test_means_and_intervals_over_seeds_at_the_last_step():
    points = numbers().points
    assert list(dict.fromkeys(points["setting"])) == ["baseline", "lns"]
    assert points[["n_layers", "difficulty"]].to_numpy().tolist() == [[2, 1], [2, 2], [4, 1], [4, 2]] * 2
    assert points["accuracy"].tolist() == pytest.approx([0.7, 0.3, 0.9, 0.5] * 2)
    assert points["lo"][:4].tolist() == pytest.approx([0.7 - HALF, 0.3 - HALF, 0.9 - HALF, 0.5 - HALF], abs=1e-6)
    assert points["hi"][:4].tolist() == pytest.approx([0.7 + HALF, 0.3 + HALF, 1.0, 0.5 + HALF], abs=1e-6)
    assert set(points["n_seeds"]) == {3} and points["positions"].tolist() == [40, 30] * 4
    said = " ".join(page_of_difficulties(numbers()).get_supxlabel().split())
    assert "mean over 3 seeds, band: 95% interval, cut at the end of the range." in said and "Thin" not in said


def test_intervals_of_many_settings_are_bars_beside_each_other():
    axes = {"n_layers": [2], "n_kv_heads": [4, 2, 1], "depth_scale": ["none", "lns"], "seed": [0, 1, 2]}
    runs = grid(axes, lambda config: {"chance_loss": math.log(5)}, **TRACKING)
    labels = (runs["n_kv_heads"].astype(str) + runs["depth_scale"]).replace("4none", "baseline")
    data = accuracy_by_difficulty(runs, rows_of(runs), dict(zip(runs["cell_id"], labels, strict=True)))
    page = page_of_difficulties(data)
    bars = [part.get_segments() for part in page.axes[0].collections]
    assert len(bars) == 6 and {len(segments) for segments in bars} == {2}
    firsts = [segments[0] for segments in bars]
    assert [ends[:, 1].tolist() for ends in firsts] == [pytest.approx([0.7 - HALF, 0.7 + HALF])] * 6
    assert len({float(ends[0, 0]) for ends in firsts}) == 6
    assert "band or bar: 95% interval" in " ".join(page.get_supxlabel().split())


def test_missing_accuracies_have_no_point_and_two_seeds_no_interval():
    rows = rows_of(RUNS)
    runs = RUNS.set_index("run_id").loc[rows["run_id"]].reset_index()
    is_baseline, is_deep, is_first = runs["depth_scale"] == "none", runs["n_layers"] == 4, runs["seed"] == 0
    rows.loc[is_baseline & is_deep & is_first, "accuracy"] = None
    rows.loc[~is_baseline & is_deep & (rows["difficulty"] == 2), "accuracy"] = None
    data = numbers(rows=rows)
    deep = data.points[data.points["n_layers"] == 4].set_index(["setting", "difficulty"])
    assert list(deep.index) == [("baseline", 1), ("baseline", 2), ("lns", 1)]
    assert deep.loc[("baseline", 1), "accuracy"] == pytest.approx(0.95)
    assert deep["n_seeds"].tolist() == [2, 2, 3] and np.isnan(deep.loc["baseline", "lo"]).all()
    page = page_of_difficulties(data)
    widths = {line.get_color(): line.get_linewidth() for line in page.axes[1].get_lines() if line.get_marker() in "os"}
    assert sorted(widths.values()) == [0.7, 1.4]
    said = " ".join(page.get_supxlabel().split())
    assert "mean over 2 to 3 seeds" in said and "Thin: fewer than 3 seeds, so no interval." in said


def test_a_configuration_with_a_diverged_seed_is_left_out():
    runs = RUNS.copy()
    runs.loc[(runs["depth_scale"] == "lns") & (runs["n_layers"] == 4) & (runs["seed"] == 1), "outcome"] = "diverged"
    data = numbers(runs)
    assert set(data.points.loc[data.points["n_layers"] == 4, "setting"]) == {"baseline"} and data.n_diverged == 1
    said = " ".join(page_of_difficulties(data).get_supxlabel().split())
    assert "Not shown: 1 configuration with a diverged seed." in said


def test_a_panel_for_each_depth_and_lines_where_a_difficulty_is_solved_and_at_chance():
    page = page_of_difficulties(numbers())
    assert [axis.get_title() for axis in page.axes] == ["2 layers", "4 layers"]
    assert {axis.get_xlabel() for axis in page.axes} == {"operations so far"}
    (legend,) = page.legends
    assert [text.get_text() for text in legend.get_texts()] == ["baseline", "lns", "solved (≥ 0.9)", "chance"]
    assert heights(numbers()) == pytest.approx([0.9, 0.2])


def test_chance_is_drawn_only_if_it_is_known_and_the_same_for_all():
    """Of unequally likely answers exp(-loss) is less than the accuracy of the likeliest."""
    assert heights(numbers(RUNS.assign(chance_loss=None))) == [0.9]
    assert heights(numbers(RUNS.assign(chance_loss=np.where(RUNS["n_layers"] == 2, math.log(60), math.log(5))))) == [
        0.9
    ]
    assert heights(numbers(RUNS.assign(corpus="task:k_hop"))) == [0.9]


def test_the_axis_names_what_the_task_counts_unless_tasks_differ():
    assert numbers(RUNS.assign(corpus="task:k_hop")).counts == "hops (k)"
    assert (
        numbers(RUNS.assign(corpus=np.where(RUNS["n_layers"] == 2, "task:k_hop", RUNS["corpus"]))).counts
        == "difficulty"
    )


def test_the_figure_of_a_store_and_the_reason_without_a_task(tmp_path):
    for name, fields in (("task", TRACKING), ("text", {})):
        config = config_of(n_layers=2, **fields)
        levels = [{"step": 9, "difficulty": level, "positions": 40, "loss": 0.5, "accuracy": 0.75} for level in (0, 1)]
        make_run(tmp_path / name, config, {"val_loss": 1.0}, difficulty=levels if fields else ())
    with open_store(tmp_path / "task") as store:
        assert FIGURES["difficulty"].drawing(store).data["accuracy"].tolist() == [0.75, 0.75]
    with open_store(tmp_path / "text") as store, pytest.raises(NothingToDraw, match="only runs on a task do"):
        FIGURES["difficulty"].drawing(store)
