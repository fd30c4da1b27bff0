"""Accuracy against difficulty: means and intervals over seeds, what is missing, and levels that are true."""

import math

import numpy as np
import pandas as pd
import pytest
from support.made_up_runs import make_run
from support.runs_frame import config_of, labelled_grid

from sparsedepth.plots.depth import by_difficulty, counts_and_chance
from sparsedepth.plots.draw import FIGURES
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.store.connection import open_store

TRACKING = {"corpus": "task:state_tracking", "seq_len": 16}
RUNS = labelled_grid(
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


def drawn(runs=RUNS, rows=None):
    return by_difficulty(runs, rows_of(runs) if rows is None else rows)


def page(*given):
    return drawn(*given).page()


def said(*given):
    return " ".join(page(*given).get_supxlabel().split())


def heights(runs=RUNS):
    """Of the horizontal lines of the first panel."""
    return [line.get_ydata()[0] for line in page(runs).axes[0].get_lines() if list(line.get_xdata()) == [0, 1]]


def test_means_and_intervals_over_seeds_at_the_last_step():
    points = drawn().data
    assert list(dict.fromkeys(points["setting"])) == ["baseline", "depth_scale=lns"]
    assert points[["panel", "x"]].to_numpy().tolist() == [[2, 1], [2, 2], [4, 1], [4, 2]] * 2
    assert points["mean"].tolist() == pytest.approx([0.7, 0.3, 0.9, 0.5] * 2)
    assert points["lo"][:4].tolist() == pytest.approx([0.7 - HALF, 0.3 - HALF, 0.9 - HALF, 0.5 - HALF], abs=1e-6)
    assert points["hi"][:4].tolist() == pytest.approx([0.7 + HALF, 0.3 + HALF, 1.0, 0.5 + HALF], abs=1e-6)
    assert set(points["n_seeds"]) == {3} and points["positions"].tolist() == [40, 30] * 4
    assert "Mean over 3 seeds, 95% interval." in said()


def test_missing_accuracies_have_no_point_and_two_seeds_no_interval():
    rows = rows_of(RUNS)
    runs = RUNS.set_index("run_id").loc[rows["run_id"]].reset_index()
    is_baseline, is_deep, is_first = runs["depth_scale"] == "none", runs["n_layers"] == 4, runs["seed"] == 0
    rows.loc[is_baseline & is_deep & is_first, "accuracy"] = None
    rows.loc[~is_baseline & is_deep & (rows["difficulty"] == 2), "accuracy"] = None
    points = drawn(rows=rows).data
    deep = points[points["panel"] == 4].set_index(["setting", "x"])
    assert list(deep.index) == [("baseline", 1), ("baseline", 2), ("depth_scale=lns", 1)]
    assert deep["n_seeds"].tolist() == [2, 2, 3] and np.isnan(deep.loc["baseline", "lo"]).all()
    assert "Mean over 2 to 3 seeds" in said(RUNS, rows)


def test_a_configuration_with_a_diverged_seed_is_left_out():
    runs = RUNS.copy()
    runs.loc[(runs["depth_scale"] == "lns") & (runs["n_layers"] == 4) & (runs["seed"] == 1), "outcome"] = "diverged"
    points = drawn(runs).data
    assert set(points.loc[points["panel"] == 4, "setting"]) == {"baseline"}
    assert "Not shown: 1 configuration with a diverged seed." in said(runs)


def test_a_panel_for_each_depth_and_lines_where_a_difficulty_is_solved_and_at_chance():
    """Of unequally likely answers exp(-loss) is less than the accuracy of the likeliest."""
    assert [axis.get_title() for axis in page().axes] == ["2 layers", "4 layers"]
    assert {axis.get_xlabel() for axis in page().axes} == {"operations so far"}
    (legend,) = page().legends
    names = ["baseline", "depth_scale=lns", "solved (≥ 0.9)", "chance"]
    assert [text.get_text() for text in legend.get_texts()] == names
    assert heights() == pytest.approx([0.9, 0.2])
    assert heights(RUNS.assign(chance_loss=None)) == heights(RUNS.assign(corpus="task:k_hop")) == [0.9]
    assert heights(RUNS.assign(chance_loss=np.where(RUNS["n_layers"] == 2, math.log(60), math.log(5)))) == [0.9]


def test_the_axis_names_what_the_task_counts_unless_tasks_differ():
    assert counts_and_chance(RUNS.assign(corpus="task:k_hop"))[0] == "hops (k)"
    both = RUNS.assign(corpus=np.where(RUNS["n_layers"] == 2, "task:k_hop", RUNS["corpus"]))
    assert counts_and_chance(both)[0] == "difficulty"


def test_the_figure_of_a_store_and_the_reason_without_a_task(tmp_path):
    for name, fields in (("task", TRACKING), ("text", {})):
        config = config_of(n_layers=2, **fields)
        levels = [{"step": 9, "difficulty": level, "positions": 40, "loss": 0.5, "accuracy": 0.75} for level in (0, 1)]
        make_run(tmp_path / name, config, {"val_loss": 1.0}, difficulty=levels if fields else ())
    with open_store(tmp_path / "task") as store:
        assert FIGURES["difficulty"].drawing(store).data["mean"].tolist() == [0.75, 0.75]
    with open_store(tmp_path / "text") as store, pytest.raises(NothingToDraw, match="only runs on a task do"):
        FIGURES["difficulty"].drawing(store)
