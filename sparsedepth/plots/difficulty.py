"""How far is a task solved? Accuracy against difficulty, one panel per depth and one line per setting.

    accuracy(d) = share of the held-out positions of difficulty d whose most likely token is the target

at the last step at which a run measured it. Configurations with a diverged seed are left out.
"""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsedepth.config.plain_text import counted
from sparsedepth.config.task import SOLVED, TASKS, TaskSpec, task_name
from sparsedepth.plots.facets import Panel, draw_facets, intervals, seeds_text
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import at_last_step, settings_in_order, trained_runs, without_diverged_configurations
from sparsedepth.plots.style import GREY, caption, setting_styles
from sparsedepth.quantities import IN_RUNS
from sparsedepth.store.connection import Store
from sparsedepth.store.small_sample import MIN_VALUES

ACCURACY = IN_RUNS["val_accuracy"]
SOLVED_DASHES, CHANCE_DASHES = (0, (5, 3)), (0, (1, 2))
ALIKE = 0.01
"""Largest difference of the accuracies of guessing that are drawn as one: estimates from counts differ by chance."""


def difficulty(store: Store) -> Drawing:
    """Raises NothingToDraw if no finished run has accuracies by difficulty."""
    runs = trained_runs(store)
    by_run = store.frame("select run_id, step, difficulty, positions, accuracy from difficulty")
    points, n_diverged = accuracy_by_difficulty(runs, by_run)
    if points.empty:
        raise NothingToDraw("no finished run has accuracies by difficulty; only runs on a task do (corpus: task:NAME)")
    drawn = runs[runs["run_id"].isin(by_run["run_id"])]
    return Drawing(
        data=points, page=partial(page_of_difficulties, points, counts_of(drawn), chance_of(drawn), n_diverged)
    )


def accuracy_by_difficulty(runs: pd.DataFrame, by_run: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The points, from the result rows of `runs` and the rows of `difficulty`: setting, panel (n_layers), x
    (difficulty), mean, lo, hi, n_seeds, positions (the fewest of a run); and the configurations with a diverged
    seed."""
    complete, n_diverged = without_diverged_configurations(runs)
    complete = complete.loc[complete["outcome"] == "ok", ["run_id", "setting", "n_layers", "seed"]]
    rows = at_last_step(by_run).merge(complete, on="run_id").dropna(subset="accuracy")
    rows = rows.rename(columns={"difficulty": "x", "n_layers": "panel", "accuracy": "value"})
    by = ["setting", "panel", "x"]
    points = intervals(rows.sort_values(by), by)
    points["lo"], points["hi"] = (points[end].clip(*ACCURACY.range) for end in ("lo", "hi"))
    fewest = rows.groupby(by)["positions"].min()
    return points.join(fewest, on=by) if len(points) else points, n_diverged


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


def page_of_difficulties(
    points: pd.DataFrame, counts: str = "difficulty", chance: float | None = None, n_diverged: int = 0
) -> Figure:
    """One panel per depth."""
    settings = settings_in_order(points["setting"])
    levels = {f"solved (≥ {SOLVED:g})": (SOLVED, SOLVED_DASHES)}
    levels |= {"chance": (chance, CHANCE_DASHES)} if chance is not None else {}

    def draw_levels(axis: Any) -> None:
        for height, dashes in levels.values():
            axis.axhline(height, color=GREY, linewidth=1.0, linestyle=dashes)

    kinds = [
        Panel(
            key=depth,
            title=counted(depth, "layer"),
            x_label=counts,
            y_label=ACCURACY.axis_label,
            range=(0, 1.03),
            decorate=draw_levels,
        )
        for depth in sorted(set(points["panel"]))
    ]
    lines = [Line2D([], [], color=GREY, linestyle=dashes, label=label) for label, (_, dashes) in levels.items()]
    page, _ = draw_facets(points, kinds, setting_styles(settings), size=(3.2, 2.8), extra=lines)
    text = f"{counted(len(settings), 'setting')}, each at its tuned values, if any: mean over {seeds_text(points)}"
    text += ", 95% interval." if points["n_seeds"].max() >= MIN_VALUES else "."
    text += f" Not shown: {counted(n_diverged, 'configuration')} with a diverged seed." if n_diverged else ""
    caption(page, text)
    return page
