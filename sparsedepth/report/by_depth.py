"""The recipe of each depth, one row per depth, and the effect of depth itself at the baseline."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from sparsedepth.effects.cells import unit_of
from sparsedepth.effects.depth_slope import depth_slope
from sparsedepth.effects.intervals import POWER
from sparsedepth.effects.knobs import changed, find_knobs, tuned_fields
from sparsedepth.effects.sentences import estimate_text, size_text
from sparsedepth.recipe.card import MeasuredConfiguration, Recipe
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.comparison_rows import comparison_rows
from sparsedepth.recipe.conclusion import detectable_sizes, duration, tested
from sparsedepth.recipe.tables import BEST_MEASURED, cut_text
from sparsedepth.report.tables import Table, table_of
from sparsedepth.store.tuning_roles import result_rows

UNEVEN = " ‡"
"""Marks a depth at which a setting was tuned unevenly."""


def recipes_by_depth(runs: pd.DataFrame, objective: str) -> tuple[Table, str]:
    """The recipe of each depth, from the same rows of `runs` as the card, and the caption of the table."""
    recipes = [derive(runs, int(depth), objective) for depth in sorted(set(result_rows(runs)["n_layers"].dropna()))]
    lines = [(recipe, comparison_rows(runs, recipe)) for recipe in recipes]
    columns = [
        ("n_layers", ""),
        ("use", "changes shown to help, else the baseline"),
        ("lr", "in brackets: values not distinguishable from it"),
        ("seeds", ""),
        (objective, "mean over seeds, with its 95% interval"),
        ("gain", "against the baseline of this depth, with its 95% interval"),
        ("detectable", f"the smallest gain of a setting that such a sweep detects with {POWER:.0%} power"),
        ("training FLOPs", "of a run; x: relative to the baseline"),
        ("time", "of a run, as measured: depends on the load of its machine"),
        ("best measured", BEST_MEASURED),
    ]
    text = f"What to use at each depth, by {objective}"
    if baselines := dict.fromkeys(c.contrast.baseline for recipe in recipes for c in tested(recipe)):
        text += f"; baseline: {', '.join(baselines)}"
    text += f"; detectable: the smallest gain that such a sweep detects with {POWER:.0%} power"
    if any(row.rivals for _, measured in lines for row in measured):
        text += "; lr in brackets: not distinguishable from it"
    if cut := cut_text((row for _, measured in lines for row in measured), objective):
        text += f"; {objective}: 95% interval over seeds{cut}"
    if any(_is_uneven(recipe) for recipe in recipes):
        text += f";{UNEVEN} uneven tuning of a setting there"
    return table_of(columns, [list(_line(recipe, measured)) for recipe, measured in lines]), text


def _line(recipe: Recipe, measured: tuple[MeasuredConfiguration, ...]) -> Iterator[Any]:
    used = next((row for row in measured if ("recommended" if recipe.changes else "baseline") in row.parts), None)
    best = next((row for row in measured if "best measured" in row.parts), None)
    yield recipe.depth
    yield " and ".join(change.contrast.setting for change in recipe.changes) or "baseline"
    yield None if used is None or used.lr is None else f"{used.lr:g}{_rivals(used)}"
    yield None if used is None else used.n_seeds
    yield None if used is None or used.mean is None else f"{used.mean:.3g}{_interval(used)}"
    yield _gain(recipe)
    yield _detectable(recipe)
    flops = None if used is None or used.train_flops is None else f"{used.train_flops:.2g}"
    yield flops and flops + (f" (x{used.flops:.3g})" if used is not None and used.flops else "")
    yield None if used is None or used.seconds is None else duration(used.seconds)
    yield None if best is None or best.mean is None else f"{best.setting}: {best.mean:.3g}"


def _rivals(row: MeasuredConfiguration) -> str:
    return f" ({', '.join(f'{lr:g}' for lr in row.rivals)})" if row.rivals else ""


def _interval(row: MeasuredConfiguration) -> str:
    return "" if row.lo is None or row.hi is None else f" ({row.lo:.3g} to {row.hi:.3g})"


def _gain(recipe: Recipe) -> str:
    """The gain of all changes together if they were run together, else of each; 'none shown' without changes."""
    if not recipe.changes:
        return "none shown" if tested(recipe) else "nothing tried"
    together = recipe.stack.against_baseline if recipe.stack else None
    gains = [together] if together else [change.contrast for change in recipe.changes]
    return "; ".join(estimate_text(gain.effect, gain.unit) for gain in gains)


def _detectable(recipe: Recipe) -> str | None:
    """The range over the settings without a verdict."""
    text = " to ".join(dict.fromkeys(size_text(size, recipe.unit) for size in detectable_sizes(recipe)))
    return f"{text}{UNEVEN if _is_uneven(recipe) else ''}" if text else None


def _is_uneven(recipe: Recipe) -> bool:
    return any(candidate.contrast.verdict_blocked_by for candidate in tested(recipe))


def depth_sentence(trained: pd.DataFrame, loss: str) -> str:
    """The effect of doubling n_layers on the loss at the baseline; '' if no line of runs has two depths."""
    finished = trained[trained["outcome"] == "ok"]
    baseline = finished[changed(finished, find_knobs(trained)).map(len) == 0]
    along = depth_slope(baseline, loss) if len(baseline) else None
    if along is None or along.slope.mean is None:
        return ""
    own = ", each depth at its own tuned lr (the interval leaves out the error of choosing it)"
    own = own if "lr" in tuned_fields(trained) else ""
    size = estimate_text(along.slope, f"{unit_of(loss, trained)} per doubling of n_layers")
    seeds = range_text(baseline.groupby("n_layers")["seed"].nunique())
    depths = f"n_layers {', '.join(map(str, along.depths))}"
    return f"Depth at the baseline: {loss} {size} over {depths}, with {seeds} seeds each{own}."


def range_text(counts: pd.Series) -> str:
    """'6 to 16'; '6' if all are equal; '0' without counts."""
    if counts.empty:
        return "0"
    return " to ".join(dict.fromkeys(map(str, (counts.min(), counts.max()))))
