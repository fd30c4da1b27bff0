"""How far is a task solved? Accuracy against difficulty, one panel per depth and one line per setting.

    accuracy(d) = share of the held-out positions of difficulty d whose most likely token is the target

at the last step at which a run measured it. A setting is how a configuration differs from the baseline
(`store.setting`), at its tuned values. A point is the mean over seeds with Student's 95% interval (from three seeds
on): a band, or bars at the marked points where more than MOST_BANDS bands would lie on each other. Configurations with
a diverged seed are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsedepth.config.plain_text import counted
from sparsedepth.config.task import SOLVED, TASKS, TaskSpec, task_name
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import (
    at_last_step,
    setting_names,
    settings_in_order,
    trained_runs,
    without_diverged_configurations,
)
from sparsedepth.plots.style import GREY, caption, groups, layer_ticks, setting_styles, settings_legend
from sparsedepth.quantities import IN_RUNS
from sparsedepth.store.connection import Store
from sparsedepth.store.small_sample import MIN_VALUES, finished_values, mean_interval

COLUMNS = 3
ACCURACY = IN_RUNS["val_accuracy"]
THIN, THICK = 0.7, 1.4
"""Of a line without and with an interval."""
MOST_MARKERS = 10
"""Per line, which tell lines apart in grey print."""
MOST_BANDS = 2
"""Settings of a panel whose intervals are bands."""
SOLVED_DASHES, CHANCE_DASHES = (0, (5, 3)), (0, (1, 2))
ALIKE = 0.01
"""Largest difference of the accuracies of guessing that are drawn as one: estimates from counts differ by chance."""


@dataclass(frozen=True, kw_only=True)
class AccuracyByDifficulty:
    points: pd.DataFrame
    """Columns: setting (the baseline first), n_layers, difficulty, accuracy (mean), lo, hi (NaN below three seeds),
    n_seeds, positions (the fewest of a run)."""
    n_diverged: int
    """Configurations with a diverged seed."""
    counts: str
    """What the difficulty of the task counts; 'difficulty' if tasks count different things."""
    chance: float | None
    """Accuracy of guessing, if it is known, and the same for all runs at every difficulty."""


def difficulty(store: Store) -> Drawing:
    """Raises NothingToDraw if no finished run has accuracies by difficulty."""
    by_run = store.frame("select run_id, step, difficulty, positions, accuracy from difficulty")
    data = accuracy_by_difficulty(trained_runs(store), by_run, setting_names(store))
    if data.points.empty:
        raise NothingToDraw("no finished run has accuracies by difficulty; only runs on a task do (corpus: task:NAME)")
    return Drawing(data=data.points, page=partial(page_of_difficulties, data))


def accuracy_by_difficulty(
    runs: pd.DataFrame, by_run: pd.DataFrame, settings: Mapping[str, str]
) -> AccuracyByDifficulty:
    """The numbers, from the result rows of `runs`, the rows of `difficulty`, and cell_id -> setting."""
    complete, n_diverged = without_diverged_configurations(runs)
    complete = complete[["run_id", "cell_id", "n_layers", "seed", "outcome", "corpus", "chance_loss"]]
    rows = at_last_step(by_run).merge(complete, on="run_id")
    rows = rows.assign(setting=rows["cell_id"].map(dict(settings)))
    points, by = [], ["setting", "n_layers", "difficulty"]
    for (setting, n_layers, level), same in groups(rows.sort_values(by), *by):
        if values := finished_values(same, "accuracy"):
            ends = map(ACCURACY.clipped, mean_interval(values))
            points.append((setting, int(n_layers), int(level), *ends, len(values), same["positions"].min()))
    frame = pd.DataFrame(points, columns=[*by, "accuracy", "lo", "hi", "n_seeds", "positions"])
    frame = frame.astype({"lo": float, "hi": float})
    order = frame["setting"].map(settings_in_order(frame["setting"]).index)
    drawn = rows.drop_duplicates("run_id")
    words = {task.difficulty if task else "difficulty" for task in _tasks(drawn)}
    return AccuracyByDifficulty(
        points=frame.iloc[order.argsort(kind="stable")].reset_index(drop=True),
        n_diverged=n_diverged,
        counts=words.pop() if len(words) == 1 else "difficulty",
        chance=_chance(drawn),
    )


def _tasks(runs: pd.DataFrame) -> list[TaskSpec | None]:
    return [TASKS.get(task_name(corpus) or "") for corpus in runs["corpus"]]


def _chance(runs: pd.DataFrame) -> float | None:
    """exp(-chance_loss): the accuracy of guessing among equally likely answers. Of unequal ones the loss of guessing
    does not say how often the likeliest is right."""
    chance = np.exp(-pd.to_numeric(runs["chance_loss"]))
    is_known = len(runs) and chance.notna().all() and all(task and task.has_even_answers for task in _tasks(runs))
    return float(chance.mean()) if is_known and chance.max() - chance.min() < ALIKE else None


def page_of_difficulties(data: AccuracyByDifficulty) -> Figure:
    """One panel per depth."""
    points = data.points
    depths, settings = sorted(set(points["n_layers"])), list(dict.fromkeys(points["setting"]))
    styles = setting_styles(settings)
    n_rows = -(-len(depths) // COLUMNS)
    n_columns = -(-len(depths) // n_rows)
    page = Figure(figsize=(max(5.2, 3.2 * n_columns + 0.4), 2.8 * n_rows + 1.0), layout="constrained")
    axes = page.subplots(n_rows, n_columns, squeeze=False, sharex=True, sharey=True).ravel()
    levels = {f"solved (≥ {SOLVED:g})": (SOLVED, SOLVED_DASHES)}
    levels |= {"chance": (data.chance, CHANCE_DASHES)} if data.chance is not None else {}
    for axis, depth in zip(axes, depths, strict=False):
        for height, dashes in levels.values():
            axis.axhline(height, color=GREY, linewidth=1.0, linestyle=dashes)
        _draw_depth(axis, points[points["n_layers"] == depth], styles)
        axis.set_title(counted(depth, "layer"))
        axis.set(xlabel=data.counts, ylabel=ACCURACY.axis_label, ylim=(0, 1.03))
        axis.xaxis.label.set_color(GREY)
        axis.tick_params(labelleft=True, labelbottom=True)
    layer_ticks(axes[0].xaxis)
    for axis in axes[len(depths) :]:
        axis.remove()
    lines = [Line2D([], [], color=GREY, linestyle=dashes, label=label) for label, (_, dashes) in levels.items()]
    settings_legend(page, styles, 1 + n_columns, lines)
    few, most = points["n_seeds"].min(), points["n_seeds"].max()
    text = f"{counted(len(settings), 'setting')}, each at its tuned values, if any: mean over "
    text += f"{counted(most, 'seed') if few == most else f'{few} to {most} seeds'}"
    is_cut = any(ACCURACY.cut_at(ends) for ends in zip(points["lo"], points["hi"], strict=True))
    cut = ", cut at the end of the range" if is_cut else ""
    has_bars = points.groupby("n_layers")["setting"].nunique().max() > MOST_BANDS
    text += f", {'band or bar' if has_bars else 'band'}: 95% interval{cut}." if most >= MIN_VALUES else "."
    text += f" Thin: fewer than {MIN_VALUES} seeds, so no interval." if few < MIN_VALUES else ""
    if data.n_diverged:
        text += f" Not shown: {counted(data.n_diverged, 'configuration')} with a diverged seed."
    caption(page, text)
    return page


def _draw_depth(axis: Any, points: pd.DataFrame, styles: Mapping[str, tuple[str, str, str]]) -> None:
    settings = list(dict.fromkeys(points["setting"]))
    for (setting,), line in groups(points, "setting"):
        colour, marker, dashes = styles[setting]
        x, step = line["difficulty"], -(-len(line) // MOST_MARKERS)
        has_interval = line["lo"].notna().all()
        axis.plot(
            x, line["accuracy"], color=colour, marker=marker, linestyle=dashes, markersize=3.5, markeredgewidth=0,
            linewidth=THICK if has_interval else THIN, markevery=step,
        )  # fmt: skip
        if len(settings) <= MOST_BANDS:
            fill, edge = (colour, 0.12), (colour, 0.4)
            axis.fill_between(x, line["lo"], line["hi"], facecolor=fill, edgecolor=edge, linewidth=0.5)
        else:  # beside each other, around the point
            shift = 0.6 * settings.index(setting) / (len(settings) - 1) - 0.3
            marked = line[::step]
            axis.vlines(
                marked["difficulty"] + shift, marked["lo"], marked["hi"], color=colour, alpha=0.7, linewidth=1.1
            )
