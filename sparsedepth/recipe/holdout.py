"""The test that counts: fit on the shallower depths, predict a deeper one before looking, then score.

With p_j the predicted (shrunk) and y_j the measured effect of setting j at the held-out depth,

    error             mean_j |p_j - y_j|, beside mean_j |y_j|: the error of predicting no effect
    signs             share of the settings whose measured effect is distinguishable that are predicted with its sign
    decision accuracy share of all pairs of configurations run there whose order is predicted, a predicted tie counted
                      half (DataDecide, 2504.11393); a configuration is predicted at the sum of its settings' p_j
    regret            how much worse the recommended configuration is than the best one run there; the best of noisy
                      means flatters itself, so regret is overstated rather than understated

The recipe is confirmed if its runs there are distinguishably better than the baseline's, seed by seed.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from sparsedepth import quantities
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.knobs import Knob, Plain, labels
from sparsedepth.effects.pairs import unit_of, values_of
from sparsedepth.effects.scale import decisions
from sparsedepth.recipe.card import Candidate, Comparison, Holdout, Outcome, Prediction, Recipe
from sparsedepth.recipe.choose import compare_cells, comparison_of, derive, rows_at, settings_with
from sparsedepth.recipe.predict import measured
from sparsedepth.store.tuning import standing

OUTCOMES: dict[Comparison, Outcome] = {
    "better": "confirmed",
    "worse": "refuted",
    "not distinguishable": "not confirmed",
    "not compared": "not tested",
}
"""A recipe's runs against the baseline's -> what they say of the recipe."""


def hold_out(
    runs: pd.DataFrame,
    depth: int,
    objective: str = "val_loss",
    matched: str = "tokens",
    baselines: Mapping[str, Plain] | None = None,
) -> Holdout:
    """Score a depth against what the runs at smaller depths predict of it.

    Raises ValueError where the depth has no finished run, or fewer than two smaller depths have.
    """
    known = standing(runs)
    fitted_on = _shallower(known, depth)
    shallower, there = known[known["n_layers"] < depth], known[known["n_layers"] == depth]
    recipe = derive(shallower, depth, objective, matched, baselines)
    tested = {candidate.contrast.knob for candidate in recipe.candidates}
    knobs = [knob for knob in rows_at(shallower, depth, baselines).knobs if knob.name in tested]
    by_setting = {c.setting: c for c in measured(known, knobs, objective, depth)}
    predictions = tuple(Prediction(candidate=c, measured=by_setting.get(c.contrast.setting)) for c in recipe.candidates)
    both = [(p.candidate.shrunk, p.measured) for p in predictions]
    seen = [(shrunk, c.effect.mean, c) for shrunk, c in both if shrunk is not None and c and c.effect.mean is not None]
    signed = [(shrunk, mean) for shrunk, mean, contrast in seen if contrast.verdict != "not distinguishable"]
    cells = _cells(there, knobs, recipe)
    right, n_decisions = decisions(cells["predicted"].to_numpy(float), cells["measured"].to_numpy(float))
    gain = compare_cells(there, knobs, (), recipe.changes, recipe) if recipe.changes else None
    return Holdout(
        depth=depth,
        fitted_on=fitted_on,
        objective=objective,
        unit=unit_of(objective),
        changes=tuple(change.contrast.setting for change in recipe.changes),
        abstained=recipe.abstained,
        predictions=predictions,
        error=float(np.mean([abs(shrunk - mean) for shrunk, mean, _ in seen])) if seen else None,
        error_of_no_effect=float(np.mean([abs(mean) for _, mean, _ in seen])) if seen else None,
        signs_right=sum(shrunk * mean > 0 for shrunk, mean in signed),
        n_signs=len(signed),
        decisions_right=right,
        n_decisions=n_decisions,
        regret=_regret(cells, knobs, recipe.changes, quantities.sign(objective)),
        regret_of_baseline=_regret(cells, knobs, (), quantities.sign(objective)),
        n_configurations=len(cells),
        gain=gain,
        outcome=outcome_of(gain),
    )


def outcome_of(gain: Contrast | None) -> Outcome:
    """What a recipe's runs against the baseline's say of it."""
    return OUTCOMES[comparison_of(gain)]


def _shallower(runs: pd.DataFrame, depth: int) -> tuple[int, ...]:
    depths = sorted(set(map(int, runs.loc[runs["outcome"] == "ok", "n_layers"])))
    smaller = tuple(each for each in depths if each < depth)
    if depth not in depths or len(smaller) < 2:
        have = ", ".join(map(str, depths)) or "none"
        raise ValueError(
            f"holdout depth {depth} needs finished runs there and at two smaller depths; there are: {have}"
        )
    return smaller


def _cells(runs: pd.DataFrame, knobs: Sequence[Knob], recipe: Recipe) -> pd.DataFrame:
    """One row per configuration whose runs all finished and whose settings were seen: settings, predicted, measured."""
    shrunk = {candidate.contrast.setting: candidate.shrunk or 0.0 for candidate in recipe.candidates}
    texts = zip(*(labels(runs, knob) for knob in knobs), strict=True) if knobs else (() for _ in range(len(runs)))
    frame = pd.DataFrame(
        {
            "cell": runs["cell_id"].to_numpy(),
            "settings": list(texts),
            "value": values_of(runs, recipe.objective).to_numpy(),
        }
    )
    rows = []
    for _, cell in frame.groupby("cell"):
        settings = cell["settings"].iloc[0]
        known = all(text in knob.settings for knob, text in zip(knobs, settings, strict=True))
        if known and cell["value"].notna().all():
            expected = sum(shrunk.get(text, 0.0) for text in settings)
            rows.append({"settings": settings, "predicted": expected, "measured": float(cell["value"].mean())})
    return pd.DataFrame(rows, columns=["settings", "predicted", "measured"])


def _regret(cells: pd.DataFrame, knobs: Sequence[Knob], changes: Sequence[Candidate], sign: int) -> float | None:
    settings = tuple(settings_with(knobs, changes).values())
    chosen = cells.loc[[cell == settings for cell in cells["settings"]], "measured"]
    return float((sign * cells["measured"]).max() - sign * chosen.mean()) if len(chosen) else None
