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

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.knobs import Knob, Plain, labels
from sparsedepth.effects.pairs import unit_of, values_of
from sparsedepth.effects.sentences import counted, estimate_text
from sparsedepth.recipe.card import Outcome
from sparsedepth.recipe.choose import Recipe, Tested, compare_cells, derive
from sparsedepth.recipe.predict import measured
from sparsedepth.store.tuning import standing


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One setting at the held-out depth: what was predicted, and what its runs said."""

    setting: str
    baseline: str
    predicted: float | None
    """Shrunk; None where the shallower runs give no interval."""
    predicted_lo: float | None
    predicted_hi: float | None
    measured: float | None
    measured_lo: float | None
    measured_hi: float | None
    distinguishable: bool
    """Whether the measured effect is."""


@dataclass(frozen=True, kw_only=True)
class Holdout:
    depth: int
    fitted_on: tuple[int, ...]
    objective: str
    unit: str
    changes: tuple[str, ...]
    """The settings recommended before looking; none if it abstained."""
    abstained: str
    """Why it did; empty if it did not."""
    predictions: tuple[Prediction, ...]
    error: float | None
    error_of_no_effect: float | None
    signs_right: int
    n_signs: int
    decisions_right: float
    n_decisions: int
    regret: float | None
    """None where the recommended configuration was not run there, or diverged."""
    regret_of_baseline: float | None
    n_configurations: int
    gain: float | None
    """Recommended less baseline, at the held-out depth."""
    gain_text: str
    outcome: Outcome

    @property
    def decision_accuracy(self) -> float | None:
        return self.decisions_right / self.n_decisions if self.n_decisions else None


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
    recipe = derive(known[known["n_layers"] < depth], depth, objective, matched, baselines)
    there = known[known["n_layers"] == depth]
    knobs = tuple({one.knob.name: one.knob for one in recipe.tested}.values())
    found = {one.setting: one for knob in knobs for one in measured(there, knob, objective, depth)}
    predictions = [_prediction(one, found.get(one.contrast.setting)) for one in recipe.tested]
    both = [(one.predicted, one.measured) for one in predictions if one.predicted is not None]
    scored = [(p, y) for p, y in both if y is not None]
    signed = [one for one in predictions if one.distinguishable and one.predicted is not None]
    cells = _cells(there, knobs, recipe)
    right, n_decisions = decisions(cells["predicted"].to_numpy(float), cells["measured"].to_numpy(float))
    gain = compare_cells(there, knobs, (), recipe.changes, objective) if recipe.changes else None
    return Holdout(
        depth=depth,
        fitted_on=fitted_on,
        objective=objective,
        unit=unit_of(objective),
        changes=tuple(one.contrast.setting for one in recipe.changes),
        abstained=recipe.reason,
        predictions=tuple(predictions),
        error=float(np.mean([abs(p - y) for p, y in scored])) if scored else None,
        error_of_no_effect=float(np.mean([abs(y) for _, y in scored])) if scored else None,
        signs_right=sum((one.predicted or 0.0) * (one.measured or 0.0) > 0 for one in signed),
        n_signs=len(signed),
        decisions_right=right,
        n_decisions=n_decisions,
        regret=_regret(cells, _text(knobs, recipe.changes), recipe.sign),
        regret_of_baseline=_regret(cells, _text(knobs, ()), recipe.sign),
        n_configurations=len(cells),
        gain=gain.effect.mean if gain else None,
        gain_text=estimate_text(gain.effect, gain.unit) if gain else "not compared",
        outcome=outcome_of(gain, recipe.sign),
    )


def _shallower(runs: pd.DataFrame, depth: int) -> tuple[int, ...]:
    depths = sorted(set(map(int, runs.loc[runs["outcome"] == "ok", "n_layers"])))
    found = tuple(one for one in depths if one < depth)
    if depth not in depths or len(found) < 2:
        have = ", ".join(map(str, depths)) or "none"
        raise ValueError(
            f"holdout depth {depth} needs finished runs there and at two smaller depths; there are: {have}"
        )
    return found


def outcome_of(gain: Contrast | None, sign: int) -> Outcome:
    """What a recipe's runs against the baseline's say of it."""
    if gain is None or (gain.effect.mean is None and not gain.n_diverged):
        return "not tested"
    if gain.n_diverged:
        return "refuted"
    if gain.verdict == "not distinguishable":
        return "not confirmed"
    return "confirmed" if (gain.verdict == "higher") == (sign > 0) else "refuted"


def decisions(predicted_C: np.ndarray, measured_C: np.ndarray) -> tuple[float, int]:
    """How many pairs of configurations are ordered as predicted, a predicted tie counted half; and how many pairs."""
    right, n = 0.0, 0
    for a, b in itertools.combinations(range(len(predicted_C)), 2):
        truth = np.sign(measured_C[a] - measured_C[b])
        if truth:
            n += 1
            right += (1 + truth * np.sign(predicted_C[a] - predicted_C[b])) / 2
    return float(right), n


def _prediction(tested: Tested, found: Contrast | None) -> Prediction:
    effect = tested.contrast.effect
    return Prediction(
        setting=tested.contrast.setting,
        baseline=tested.contrast.baseline,
        predicted=tested.shrunk,
        predicted_lo=effect.lo,
        predicted_hi=effect.hi,
        measured=found.effect.mean if found else None,
        measured_lo=found.effect.lo if found else None,
        measured_hi=found.effect.hi if found else None,
        distinguishable=found is not None and found.verdict != "not distinguishable",
    )


def _text(knobs: Sequence[Knob], changes: Sequence[Tested]) -> tuple[str, ...]:
    """A configuration as the setting of every knob."""
    wanted = {one.contrast.knob: one.contrast.setting for one in changes}
    return tuple(wanted.get(knob.name, knob.baseline) for knob in knobs)


def _cells(runs: pd.DataFrame, knobs: Sequence[Knob], recipe: Recipe) -> pd.DataFrame:
    """One row per configuration whose runs all finished and whose settings were seen: settings, predicted, measured."""
    shrunk = {one.contrast.setting: one.shrunk or 0.0 for one in recipe.tested}
    texts = zip(*(labels(runs, knob) for knob in knobs), strict=True) if knobs else (() for _ in range(len(runs)))
    frame = pd.DataFrame(
        {
            "cell": runs["cell_id"].to_numpy(),
            "settings": list(texts),
            "value": values_of(runs, recipe.objective).to_numpy(),
        }
    )
    seen = {knob.name: set(knob.settings) for knob in knobs}
    rows = []
    for _, one in frame.groupby("cell"):
        settings = one["settings"].iloc[0]
        known = all(text in seen[knob.name] for knob, text in zip(knobs, settings, strict=True))
        if known and one["value"].notna().all():
            expected = sum(shrunk.get(text, 0.0) for text in settings)
            rows.append({"settings": settings, "predicted": expected, "measured": float(one["value"].mean())})
    return pd.DataFrame(rows, columns=["settings", "predicted", "measured"])


def _regret(cells: pd.DataFrame, settings: tuple[str, ...], sign: int) -> float | None:
    chosen = cells.loc[[one == settings for one in cells["settings"]], "measured"]
    return float((sign * cells["measured"]).max() - sign * chosen.mean()) if len(chosen) else None


def sentences(found: Holdout) -> list[str]:
    """The held-out test in words, the verdict first."""
    depths = ", ".join(map(str, found.fitted_on))
    chosen = " and ".join(found.changes) or f"no change ({found.abstained})"
    lines = [
        f"Held-out test: fitted on n_layers {depths}, which advise {chosen} at n_layers={found.depth}: "
        f"{found.outcome}; there it changed {found.objective} by {found.gain_text}"
    ]
    for one in found.predictions:
        lines.append(f"Predicted: {one.setting} vs {one.baseline}: {_number(one.predicted)}, measured {_range(one)}")
    right = "none to order" if found.decision_accuracy is None else f"{found.decision_accuracy:.0%}"
    lines.append(
        f"Error {_number(found.error, '')} (of predicting no effect {_number(found.error_of_no_effect, '')}) "
        f"{found.unit}; signs right {found.signs_right} of {found.n_signs} that are distinguishable; "
        f"decision accuracy {right} over {counted(found.n_decisions, 'pair')} of "
        f"{counted(found.n_configurations, 'configuration')}; regret "
        f"{_number(found.regret, '')} against the best configuration there (the baseline's "
        f"{_number(found.regret_of_baseline, '')})"
    )
    return lines


def _number(value: float | None, signed: str = "+") -> str:
    return "unknown" if value is None else f"{value:{signed}.3g}"


def _range(one: Prediction) -> str:
    interval = "" if one.measured_lo is None else f" (95% interval {one.measured_lo:+.3g} to {one.measured_hi:+.3g})"
    return f"{_number(one.measured)}{interval}"
