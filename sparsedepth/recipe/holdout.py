"""The test that counts: fit on the shallower depths (smaller widths, budgets), predict the largest before looking, then
score.

With p_j the predicted (shrunk) and y_j the measured effect of setting j at the held-out depth, width or budget,

    error             mean_j |p_j - y_j| with Student's interval over settings, beside mean_j |y_j|: the error of
                      predicting no effect
    signs             share of the settings whose measured effect is distinguishable that are predicted with its sign
    decision accuracy share of all pairs of configurations run there whose order is predicted, a predicted tie counted
                      half (DataDecide, 2504.11393); a configuration is predicted at the sum of its settings' p_j; its
                      interval is Wilson's, with the settings as units (`accuracy_interval`)
    regret            how much worse the recommended configuration is than the best one run there; the best of noisy
                      means flatters itself, so regret is overstated rather than understated

Error and accuracy stand beside those of a naive prediction: the setting of the largest predicted gain does that, and
all else is equal. The recipe is confirmed if its runs there are distinguishably better than the baseline's, seed by
seed.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from sparsedepth import quantities
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.intervals import estimate
from sparsedepth.effects.knobs import Knob, Plain, labels
from sparsedepth.effects.pairs import values_of
from sparsedepth.effects.scale import decisions
from sparsedepth.recipe.card import Candidate, Comparison, Holdout, Outcome, Prediction, Recipe
from sparsedepth.recipe.choose import compare_cells, comparison_of, derive, rows_at, settings_with
from sparsedepth.recipe.predict import measured
from sparsedepth.store.small_sample import share_interval
from sparsedepth.store.tuning_roles import result_rows

OUTCOMES: dict[Comparison, Outcome] = {
    "better": "confirmed",
    "worse": "refuted",
    "not distinguishable": "not confirmed",
    "not compared": "not tested",
}
"""A recipe's runs against the baseline's -> what they say of the recipe."""


SCALES: Mapping[str, str] = {"params": "d_model", "tokens": "train_tokens"}
"""What may be held out beside a depth -> the field that says how large a run is."""


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
    known = result_rows(runs)
    fitted_on = _smaller(known, "n_layers", depth, 2)
    shallower = known[known["n_layers"] < depth]
    recipe = derive(shallower, depth, objective, matched, baselines)
    knobs = _tested(shallower, recipe, baselines)
    by_setting = {c.setting: c for c in measured(known, knobs, objective, depth)}
    return _score(known[known["n_layers"] == depth], knobs, recipe, by_setting, ("n_layers", depth, fitted_on))


def hold_out_scale(
    runs: pd.DataFrame,
    scale: str,
    depth: int | None = None,
    objective: str = "val_loss",
    matched: str = "tokens",
    baselines: Mapping[str, Plain] | None = None,
) -> Holdout:
    """Score the largest of SCALES at one depth (default: the deepest) against what the smaller ones say, as it is.

    Raises ValueError where that depth has one width, or budget, alone.
    """
    known, field = result_rows(runs), SCALES[scale]
    depth = int(known.loc[known["outcome"] == "ok", "n_layers"].max()) if depth is None else depth
    known = known[known["n_layers"] == depth]
    sizes = pd.to_numeric(known.loc[known["outcome"] == "ok", field], errors="coerce").dropna()
    if sizes.nunique() < 2:
        have = ", ".join(f"{size:g}" for size in sorted(set(sizes))) or "none"
        raise ValueError(f"holdout {scale} needs runs of two {field} or more at n_layers={depth}; there are: {have}")
    largest = int(sizes.max())
    smaller, there = known[known[field] < largest], known[known[field] == largest]
    recipe = derive(smaller, depth, objective, matched, baselines)
    knobs = [knob for knob in _tested(smaller, recipe, baselines) if field not in knob.fields]
    by_setting = {c.setting: c for c in measured(there, knobs, objective, depth)}
    return _score(there, knobs, recipe, by_setting, (field, largest, _smaller(known, field, largest, 1)))


def _tested(runs: pd.DataFrame, recipe: Recipe, baselines: Mapping[str, Plain] | None) -> list[Knob]:
    """The knobs of the recipe's candidates."""
    tested = {candidate.contrast.knob for candidate in recipe.candidates}
    return [knob for knob in rows_at(runs, recipe.depth, baselines).knobs if knob.name in tested]


def _score(
    there: pd.DataFrame,
    knobs: Sequence[Knob],
    recipe: Recipe,
    by_setting: Mapping[str, Contrast],
    place: tuple[str, int, tuple[int, ...]],
) -> Holdout:
    """What the runs `there` say of a recipe that has not seen them; `place`: field, value held out, values fitted."""
    objective, sign = recipe.objective, quantities.sign(recipe.objective)
    names = {knob.name for knob in knobs}
    predictions = tuple(
        Prediction(candidate=candidate, measured=by_setting.get(candidate.contrast.setting))
        for candidate in recipe.candidates
        if candidate.contrast.knob in names
    )
    both = [(p.candidate.shrunk, p.measured) for p in predictions]
    seen = [(shrunk, c.effect.mean, c) for shrunk, c in both if shrunk is not None and c and c.effect.mean is not None]
    signed = [(shrunk, mean) for shrunk, mean, contrast in seen if contrast.verdict != "not distinguishable"]
    shrunk_by_setting = {p.candidate.contrast.setting: p.candidate.shrunk or 0.0 for p in predictions}
    naive = max(shrunk_by_setting, key=lambda setting: sign * shrunk_by_setting[setting], default="")
    cells = _cells(there, knobs, objective, shrunk_by_setting, naive)
    truth_C = cells["measured"].to_numpy(float)
    right, n_decisions = decisions(cells["predicted"].to_numpy(float), truth_C)
    errors = [abs(shrunk - mean) for shrunk, mean, _ in seen]
    spread = estimate(errors)
    of_naive = [abs((shrunk if contrast.setting == naive else 0.0) - mean) for shrunk, mean, contrast in seen]
    gain = compare_cells(there, knobs, (), recipe.changes, recipe) if recipe.changes else None
    return Holdout(
        depth=recipe.depth,
        axis=place[0],
        held=place[1],
        fitted_on=place[2],
        objective=objective,
        unit=recipe.unit,
        changes=tuple(change.contrast.setting for change in recipe.changes),
        abstained=recipe.abstained,
        predictions=predictions,
        error=float(np.mean(errors)) if seen else None,
        error_interval=None if spread.lo is None or spread.hi is None else (max(spread.lo, 0.0), spread.hi),
        naive=naive,
        error_of_naive=float(np.mean(of_naive)) if seen else None,
        error_of_no_effect=float(np.mean([abs(mean) for _, mean, _ in seen])) if seen else None,
        signs_right=sum(shrunk * mean > 0 for shrunk, mean in signed),
        n_signs=len(signed),
        decisions_right=right,
        n_decisions=n_decisions,
        accuracy_interval=accuracy_interval(right, n_decisions, _n_settings(cells, knobs)),
        decisions_right_by_naive=decisions(cells["naive"].to_numpy(float), truth_C)[0],
        regret=_regret(cells, knobs, recipe.changes, sign),
        regret_of_baseline=_regret(cells, knobs, (), sign),
        n_configurations=len(cells),
        gain=gain,
        outcome=outcome_of(gain),
    )


def outcome_of(gain: Contrast | None) -> Outcome:
    """What a recipe's runs against the baseline's say of it."""
    return OUTCOMES[comparison_of(gain)]


def accuracy_interval(right: float, n_decisions: int, n_settings: int) -> tuple[float, float] | None:
    """Wilson's 95% interval (1927), as of as many decisions as these tell:

        9 m (m - 1) / (2 (2 m + 5)),    m = settings + 1

    the number whose share varies as that of all pairs of m independent configurations does where the prediction says
    nothing (Kendall 1938). Configurations share their settings' effects: 2^J of them tell no more than J + 1."""
    if not n_decisions or not n_settings:
        return None
    m = n_settings + 1
    return share_interval(right / n_decisions, 9 * m * (m - 1) / (2 * (2 * m + 5)))


def _n_settings(cells: pd.DataFrame, knobs: Sequence[Knob]) -> int:
    """Settings away from the baseline that these configurations have."""
    baselines = {knob.baseline for knob in knobs}
    return len({text for settings in cells["settings"] for text in settings} - baselines)


def _smaller(runs: pd.DataFrame, field: str, held: int, least: int) -> tuple[int, ...]:
    """The values below the one that is held out; `least` of them, and runs there, are needed."""
    depths = sorted(set(map(int, runs.loc[runs["outcome"] == "ok", field])))
    smaller = tuple(each for each in depths if each < held)
    if held not in depths or len(smaller) < least:
        have = ", ".join(map(str, depths)) or "none"
        raise ValueError(f"holdout depth {held} needs finished runs there and at two smaller depths; there are: {have}")
    return smaller


def _cells(
    runs: pd.DataFrame, knobs: Sequence[Knob], objective: str, shrunk: Mapping[str, float], naive: str
) -> pd.DataFrame:
    """One row per configuration whose runs all finished and whose settings were seen: settings, predicted, naive (by
    one setting alone), measured."""
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
        known = all(text in knob.settings for knob, text in zip(knobs, settings, strict=True))
        if known and cell["value"].notna().all():
            expected = sum(shrunk.get(text, 0.0) for text in settings)
            alone = shrunk[naive] if naive in settings else 0.0
            known_mean = float(cell["value"].mean())
            rows.append({"settings": settings, "predicted": expected, "naive": alone, "measured": known_mean})
    return pd.DataFrame(rows, columns=["settings", "predicted", "naive", "measured"])


def _regret(cells: pd.DataFrame, knobs: Sequence[Knob], changes: Sequence[Candidate], sign: int) -> float | None:
    settings = tuple(settings_with(knobs, changes).values())
    chosen = cells.loc[[cell == settings for cell in cells["settings"]], "measured"]
    return float((sign * cells["measured"]).max() - sign * chosen.mean()) if len(chosen) else None
