"""The held-out test: fit on the shallower depths (smaller widths, budgets), predict the largest, and score.

With p_j the predicted (shrunk) and y_j the measured effect of setting j at the held-out depth, width or budget,

    error             mean_j |p_j - y_j| with Student's interval over settings; for comparison mean_j |y_j|, the error
                      of predicting no effect
    signs             share of the settings with a significant measured effect that are predicted with its sign
    decision accuracy share of all pairs of configurations run there whose order is predicted, a predicted tie counted
                      half (DataDecide, 2504.11393); a configuration is predicted at the sum of its settings' p_j; its
                      interval is Wilson's, with the settings as units (`accuracy_interval`)
    regret            how much worse the recommended configuration is than the best one run there; the best of noisy
                      means is optimistic, so regret is overstated

Error and accuracy are compared with those of a naive prediction: only the setting of the largest predicted gain has an
effect. The recipe is confirmed if its runs there are significantly better than the baseline's, paired by seed.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from sparsedepth import quantities
from sparsedepth.effects.cells import values_of
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.intervals import estimate
from sparsedepth.effects.knobs import Knob, labels
from sparsedepth.effects.scale import decisions
from sparsedepth.recipe.card import Candidate, Comparison, Holdout, Outcome, Prediction, Recipe
from sparsedepth.recipe.choose import compare_cells, comparison_of, derive, rows_at, settings_with
from sparsedepth.recipe.measured import measured
from sparsedepth.store.small_sample import share_interval
from sparsedepth.store.tuning_roles import result_rows

OUTCOMES: dict[Comparison, Outcome] = {
    "better": "confirmed",
    "worse": "refuted",
    "not distinguishable": "not confirmed",
    "not compared": "not tested",
}
"""A recipe's runs against the baseline's -> the outcome for the recipe."""

SCALES: Mapping[str, str] = {"params": "d_model", "tokens": "train_tokens"}
"""What may be held out, other than a depth -> its field."""


def hold_out(
    runs: pd.DataFrame,
    depth: int,
    objective: str = "val_loss",
    matched: str = "tokens",
) -> Holdout:
    """Score the predictions for a depth from the runs at smaller depths.

    Raises ValueError where the depth has no finished run, or fewer than two smaller depths have.
    """
    results = result_rows(runs)
    depths = sorted(set(map(int, results.loc[results["outcome"] == "ok", "n_layers"])))
    fitted_on = tuple(smaller for smaller in depths if smaller < depth)
    if depth not in depths or len(fitted_on) < 2:
        have = ", ".join(map(str, depths)) or "none"
        possible = f"; try --holdout-depth {depths[-1]}" if len(depths) > 2 else ""
        raise ValueError(
            f"--holdout-depth {depth} needs finished runs there and at two smaller depths; these have n_layers {have}"
            f"{possible}"
        )
    shallower = runs[runs["n_layers"] < depth]
    recipe = derive(shallower, depth, objective, matched)
    knobs = _tested_knobs(shallower, recipe)
    by_setting = {c.setting: c for c in measured(runs, knobs, objective, depth)}
    return _score(runs[runs["n_layers"] == depth], knobs, recipe, by_setting, ("n_layers", depth, fitted_on))


def hold_out_scale(
    runs: pd.DataFrame,
    scale: str,
    depth: int | None = None,
    objective: str = "val_loss",
    matched: str = "tokens",
) -> Holdout:
    """Score the predictions for the largest width or budget (`scale`: of SCALES) at one depth (default: the deepest):
    the effects at the smaller ones, unchanged.

    Raises ValueError where that depth has only one width or budget.
    """
    results, field = result_rows(runs), SCALES[scale]
    depth = int(results.loc[results["outcome"] == "ok", "n_layers"].max()) if depth is None else depth
    results = results[results["n_layers"] == depth]
    sizes = sorted(set(pd.to_numeric(results.loc[results["outcome"] == "ok", field], errors="coerce").dropna()))
    if len(sizes) < 2:
        have = ", ".join(f"{size:g}" for size in sizes) or "none"
        raise ValueError(f"holdout {scale} needs runs of two {field} or more at n_layers={depth}; there are: {have}")
    *fitted_on, largest = map(int, sizes)
    at_depth = runs[runs["n_layers"] == depth]
    smaller, held_out = at_depth[at_depth[field] < largest], at_depth[at_depth[field] == largest]
    recipe = derive(smaller, depth, objective, matched)
    knobs = [knob for knob in _tested_knobs(smaller, recipe) if field not in knob.fields]
    by_setting = {c.setting: c for c in measured(held_out, knobs, objective, depth)}
    return _score(held_out, knobs, recipe, by_setting, (field, largest, tuple(fitted_on)))


def _tested_knobs(runs: pd.DataFrame, recipe: Recipe) -> list[Knob]:
    """The knobs of the recipe's candidates."""
    tested = {candidate.contrast.knob for candidate in recipe.candidates}
    return [knob for knob in rows_at(runs, recipe.depth).knobs if knob.name in tested]


def _score(
    held_out: pd.DataFrame,
    knobs: Sequence[Knob],
    recipe: Recipe,
    by_setting: Mapping[str, Contrast],
    split: tuple[str, int, tuple[int, ...]],
) -> Holdout:
    """The scores of a recipe on held-out runs; `split`: field, value held out, values fitted."""
    objective, sign = recipe.objective, quantities.sign(recipe.objective)
    names = {knob.name for knob in knobs}
    predictions = tuple(
        Prediction(candidate=candidate, measured=by_setting.get(candidate.contrast.setting))
        for candidate in recipe.candidates
        if candidate.contrast.knob in names
    )
    pairs = [(p.candidate.shrunk, p.measured) for p in predictions]
    scored = [
        (shrunk, c.effect.mean, c) for shrunk, c in pairs if shrunk is not None and c and c.effect.mean is not None
    ]
    signed = [(shrunk, mean) for shrunk, mean, contrast in scored if contrast.verdict != "not distinguishable"]
    shrunk_by_setting = {p.candidate.contrast.setting: p.candidate.shrunk or 0.0 for p in predictions}
    naive = max(shrunk_by_setting, key=lambda setting: sign * shrunk_by_setting[setting], default="")
    cells = _cells(result_rows(held_out), knobs, objective, shrunk_by_setting, naive)
    truth_C = cells["measured"].to_numpy(float)
    settings = {text for texts in cells["settings"] for text in texts} - {knob.baseline for knob in knobs}
    right, n_decisions = decisions(cells["predicted"].to_numpy(float), truth_C)
    errors = [abs(shrunk - mean) for shrunk, mean, _ in scored]
    interval = estimate(errors)
    naive_errors = [abs((shrunk if contrast.setting == naive else 0.0) - mean) for shrunk, mean, contrast in scored]
    gain = None
    if recipe.changes and recipe.depth is not None:
        gain = compare_cells(held_out, knobs, recipe.depth, ((), recipe.changes), objective)
    return Holdout(
        depth=recipe.depth,
        axis=split[0],
        held=split[1],
        fitted_on=split[2],
        objective=objective,
        unit=recipe.unit,
        changes=tuple(change.contrast.setting for change in recipe.changes),
        abstained=recipe.abstained,
        predictions=predictions,
        error=interval.mean,
        error_interval=None if interval.lo is None or interval.hi is None else (max(interval.lo, 0.0), interval.hi),
        naive=naive,
        error_of_naive=float(np.mean(naive_errors)) if scored else None,
        error_of_no_effect=float(np.mean([abs(mean) for _, mean, _ in scored])) if scored else None,
        signs_right=sum(shrunk * mean > 0 for shrunk, mean in signed),
        n_signs=len(signed),
        decisions_right=right,
        n_decisions=n_decisions,
        accuracy_interval=accuracy_interval(right, n_decisions, len(settings)),
        decisions_right_by_naive=decisions(cells["naive"].to_numpy(float), truth_C)[0],
        regret=_regret(cells, knobs, recipe.changes, sign),
        regret_of_baseline=_regret(cells, knobs, (), sign),
        n_configurations=len(cells),
        gain=gain,
        outcome=OUTCOMES[comparison_of(gain)],
    )


def accuracy_interval(right: float, n_decisions: int, n_settings: int) -> tuple[float, float] | None:
    """Wilson's 95% interval (1927) with the effective number of decisions

        9 m (m - 1) / (2 (2 m + 5)),    m = settings + 1

    for which a share varies as that over all pairs of m independent configurations does under an uninformative
    prediction (Kendall 1938). Configurations share their settings' effects: 2^J of them carry no more information than
    J + 1."""
    if not n_decisions or not n_settings:
        return None
    m = n_settings + 1
    return share_interval(right / n_decisions, 9 * m * (m - 1) / (2 * (2 * m + 5)))


def _cells(
    runs: pd.DataFrame, knobs: Sequence[Knob], objective: str, shrunk: Mapping[str, float], naive: str
) -> pd.DataFrame:
    """One row per configuration of known settings whose runs all finished: settings, predicted, naive (predicted by one
    setting alone), measured."""
    texts = zip(*(labels(runs, knob) for knob in knobs), strict=True) if knobs else (() for _ in range(len(runs)))
    frame = pd.DataFrame(
        {
            "cell": runs["cell_id"].to_numpy(),
            "settings": list(texts),
            "value": values_of(runs, objective).to_numpy(),
        }
    )
    rows = []
    for _, cell in frame.groupby("cell"):
        settings = cell["settings"].iloc[0]
        is_known = all(text in knob.settings for knob, text in zip(knobs, settings, strict=True))
        if is_known and cell["value"].notna().all():
            predicted = sum(shrunk.get(text, 0.0) for text in settings)
            rows.append((settings, predicted, shrunk[naive] if naive in settings else 0.0, float(cell["value"].mean())))
    return pd.DataFrame(rows, columns=["settings", "predicted", "naive", "measured"])


def _regret(cells: pd.DataFrame, knobs: Sequence[Knob], changes: Sequence[Candidate], sign: int) -> float | None:
    settings = tuple(settings_with(knobs, changes).values())
    chosen = cells.loc[[cell == settings for cell in cells["settings"]], "measured"]
    return float((sign * cells["measured"]).max() - sign * chosen.mean()) if len(chosen) else None
