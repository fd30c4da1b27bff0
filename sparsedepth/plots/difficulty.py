"""How far is a task solved? Accuracy against difficulty, one panel per depth and one line per setting.

    accuracy(d) = share of the held-out positions of difficulty d whose most likely token is the target

at the last step at which a run measured it. Configurations with a diverged seed are left out.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from sparsedepth.config.plain_text import counted
from sparsedepth.config.task import SOLVED, TASKS, TaskSpec, task_name
from sparsedepth.plots.facets import intervals, lines_drawing, panel_of
from sparsedepth.plots.page import Drawing, NothingToDraw, not_shown
from sparsedepth.plots.runs import at_last_step, trained_runs, without_diverged_configurations
from sparsedepth.plots.style import GREY
from sparsedepth.quantities import IN_RUNS
from sparsedepth.store.connection import Store

ACCURACY = "val_accuracy"
SOLVED_DASHES, CHANCE_DASHES = (0, (5, 3)), (0, (1, 2))
ALIKE = 0.01
"""Largest difference of the accuracies of guessing that are drawn as one: estimates from counts differ by chance."""


def difficulty(store: Store) -> Drawing:
    """Raises NothingToDraw if no finished run has accuracies by difficulty."""
    by_run = store.frame("select run_id, step, difficulty, positions, accuracy from difficulty")
    return by_difficulty(trained_runs(store), by_run)


def by_difficulty(runs: pd.DataFrame, by_run: pd.DataFrame) -> Drawing:
    """From the result rows of `runs` and the rows of `difficulty`. Its points: setting, panel (n_layers), x
    (difficulty), mean, lo, hi, n_seeds, positions (the fewest of a run)."""
    complete, n_diverged = without_diverged_configurations(runs)
    rows = at_last_step(by_run).merge(complete[["run_id", "setting", "n_layers", "seed"]], on="run_id")
    rows = rows.dropna(subset="accuracy")
    if rows.empty:
        raise NothingToDraw("no finished run has accuracies by difficulty; only runs on a task do (corpus: task:NAME)")
    rows = rows.rename(columns={"difficulty": "x", "n_layers": "panel", "accuracy": "value"})
    by = ["setting", "panel", "x"]
    points = intervals(rows.sort_values(by), by).join(rows.groupby(by)["positions"].min(), on=by)
    points["lo"], points["hi"] = (points[end].clip(*IN_RUNS[ACCURACY].range) for end in ("lo", "hi"))
    drawn = runs[runs["run_id"].isin(by_run["run_id"])]
    levels = {f"solved (≥ {SOLVED:g})": (SOLVED, SOLVED_DASHES)}
    levels |= {"chance": (chance, CHANCE_DASHES)} if (chance := chance_of(drawn)) is not None else {}

    def draw_levels(axis: Any) -> None:
        for height, dashes in levels.values():
            axis.axhline(height, color=GREY, linewidth=1.0, linestyle=dashes)

    look: dict[str, Any] = {"x_label": counts_of(drawn), "range": (0, 1.03), "decorate": draw_levels}
    depths = sorted(set(points["panel"]))
    return lines_drawing(
        points,
        [panel_of(ACCURACY, depth, title=counted(depth, "layer"), scale="linear", **look) for depth in depths],
        f" {counted(points['setting'].nunique(), 'setting')}, at tuned values, if any."
        + not_shown(n_diverged, "configuration", " with a diverged seed"),
        size=(3.2, 2.8),
        extra=[Line2D([], [], color=GREY, linestyle=dashes, label=label) for label, (_, dashes) in levels.items()],
    )


def counts_of(runs: pd.DataFrame) -> str:
    """What the difficulty of the task counts; 'difficulty' if tasks count different things."""
    words = {task.difficulty if task else "difficulty" for task in _tasks(runs)}
    return words.pop() if len(words) == 1 else "difficulty"


def _tasks(runs: pd.DataFrame) -> list[TaskSpec | None]:
    return [TASKS.get(task_name(corpus) or "") for corpus in runs["corpus"]]


def chance_of(runs: pd.DataFrame) -> float | None:
    """exp(-chance_loss): the accuracy of guessing among equally likely answers, if it is the same for all runs. Of
    unequal ones the loss of guessing does not say how often the likeliest is right."""
    chance = np.exp(-pd.to_numeric(runs["chance_loss"]))
    is_known = len(runs) and chance.notna().all() and all(task and task.has_even_answers for task in _tasks(runs))
    return float(chance.mean()) if is_known and chance.max() - chance.min() < ALIKE else None
