"""The recipe of each depth, one row per depth, and the effect of depth itself at the baseline."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from sparsedepth.effects.cells import unit_of
from sparsedepth.effects.depth_slope import depth_slope
from sparsedepth.effects.knobs import changed, find_knobs, tuned_fields
from sparsedepth.effects.sentences import estimate_text
from sparsedepth.effects.verdict import POWER
from sparsedepth.recipe.card import Recipe
from sparsedepth.recipe.text import changes_text, detectable_text, effect_text
from sparsedepth.report.tables import Table, table_of


def recipes_by_depth(recipes: Sequence[Recipe]) -> tuple[Table, str]:
    """The recipe of each depth, and the caption of the table."""
    objective = recipes[0].objective if recipes else "val_loss"
    columns = [
        ("n_layers", ""),
        ("use", "changes shown to help, else the baseline"),
        ("gain", "against the baseline of this depth, with its 95% interval"),
        ("detectable", f"the smallest gain of a setting that such a sweep detects with {POWER:.0%} power"),
        ("FLOPs", "of training, relative to the baseline"),
        ("lr", ""),
        ("seeds", ""),
        (f"baseline {objective}", "mean over seeds"),
    ]
    text = f"What to use at each depth, by {objective}"
    if baselines := dict.fromkeys(recipe.baseline_text for recipe in recipes if recipe.baseline_text):
        text += f"; baseline: {', '.join(baselines)}"
    text += f"; detectable: the smallest gain that such a sweep detects with {POWER:.0%} power"
    return table_of(columns, [list(_line(recipe)) for recipe in recipes]), text


def _line(recipe: Recipe) -> Iterator[Any]:
    first = recipe.effect or (recipe.candidates[0].effect if recipe.candidates else None)
    none = "none shown" if recipe.is_compared else "nothing compared"
    lr = None if first is None else first.lr if recipe.effect else first.lr_baseline
    yield recipe.depth
    yield changes_text(recipe)
    yield effect_text(recipe.effect) if recipe.effect else none
    yield detectable_text(recipe) or None
    yield None if recipe.effect is None or recipe.effect.flops is None else f"x{recipe.effect.flops:.3g}"
    yield None if lr is None else f"{lr:g}"
    yield recipe.effect.seeds if recipe.effect else recipe.baseline_seeds
    yield None if first is None or first.baseline_value is None else f"{first.baseline_value:.3g}"


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
