"""Results of a search: importance and partial dependence of each axis, from a surrogate with its held-out error.

The surrogate is a Gaussian process over the axes, each scaled to 0..1 (logarithmically if searched so; options of a
choice one-hot), with kernel exp(-|u - v|^2 / 2 l^2) + s 1(u = v) + c; l and s are those of a grid that predict left-out
proposals best, by the closed form of Rasmussen and Williams (2006, eq. 5.12): r_i = [K^-1 y]_i / [K^-1]_ii. The large c
leaves the mean free, so that no proposal contributes to the mean from which it is predicted.

    skill = 1 - sum r_i^2 / sum (y_i - mean of the others)^2     0: no better than the mean; below, worse

where r_i uses the l and s that predict the other proposals best, since a choice by r_i itself would be optimistic.

Partial dependence at a value: the mean prediction over all proposals with their axis set to it (Friedman 2001).
Importances are Optuna's, on a study of the same rows: PED-ANOVA (2304.10255), and fANOVA where scikit-learn is
installed. An importance measures how much the objective varies, not in which direction, within the search space.
"""

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.space import Interval
from sparsedepth.effects.knobs import plain
from sparsedepth.store.degeneracy import degeneracy, score_rows
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import Search, on_front
from sparsedepth.store.tuning_roles import result_rows

MIN_PROPOSALS = 8
"""With fewer there is no analysis."""
MIN_BEST = 6
"""Least number of best proposals for PED-ANOVA; Optuna's default, a tenth, is only two of twenty."""
N_POINTS = 25
LENGTHS = (0.2, 0.35, 0.6, 1.0, 2.0, 4.0)
NOISES = (1e-3, 1e-2, 0.1, 0.5, 2.0)
OPEN_MEAN = 100.0
"""c: the variance of the mean, relative to the objective's."""
MIN_SKILL = 0.2
"""Below it a partial dependence is unreliable."""


EXPLAINED = (
    "No two proposals differ in one field only, so there are no paired effects. Importance (Optuna's): how much of the "
    "objective's variation within the search space an axis explains. Partial dependence: a surrogate's mean prediction "
    "at a value of the axis; it is as reliable as the surrogate's predictions of left-out proposals. An adaptive "
    "sampler favours promising regions: its proposals are not a random sample."
)


def proposals(runs: pd.DataFrame, search: Search) -> pd.DataFrame:
    """One row per proposal, oldest first: the axes, each objective's mean over seeds (NaN if a seed diverged or ended
    early), n_seeds, on_front."""
    rows = []
    for cell_id, cell in runs.groupby("cell_id", sort=False):
        first = cell.iloc[0]
        is_incomplete = len(cell) < search.n_seeds or bool((cell["outcome"] != "ok").any())
        means = {
            name: np.nan if is_incomplete else float(pd.to_numeric(cell[name]).mean()) for name in search.objectives
        }
        started = min(map(str, cell["started"])) if "started" in cell.columns else ""
        knobs = {name: plain(first[name]) for name in search.axes}
        rows.append({"cell_id": cell_id, **knobs, **means, "n_seeds": len(cell), "started": started})
    frame = pd.DataFrame(rows).sort_values("started", kind="stable").reset_index(drop=True)
    return frame.assign(on_front=on_front(frame[list(search.objectives)].to_numpy(float), search.objectives))


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of a search, encoded as columns of numbers."""

    name: str
    values: tuple
    """Options of a choice; the ends of a range."""
    is_range: bool
    is_log: bool

    def columns(self, values: Sequence) -> np.ndarray:
        """(N, 1) for a range, (N, options) for a choice; a missing value is the middle of a range."""
        if not self.is_range:
            return np.array([[float(value == option) for option in self.values] for value in values])
        low, high = self._scale(np.array(self.values, dtype=float))
        numbers = np.array([np.nan if value is None else value for value in values], dtype=float)
        scaled = (self._scale(numbers) - low) / max(high - low, 1e-300)
        return np.where(np.isfinite(scaled), scaled, 0.5)[:, None]

    def _scale(self, values: np.ndarray) -> np.ndarray:
        return np.log(values) if self.is_log else values

    def grid(self) -> list:
        """The values at which its partial dependence is computed."""
        if not self.is_range:
            return list(self.values)
        low, high = self._scale(np.array(self.values, dtype=float))
        points = np.linspace(low, high, N_POINTS)
        return (np.exp(points) if self.is_log else points).tolist()


def axes_of(frame: pd.DataFrame, search: Search) -> list[Axis]:
    """The axes that take several values."""
    axes = []
    for name in search.axes:
        options = sorted({plain(value) for value in frame[name].tolist()}, key=value_order)
        declared = search.definition.axes.get(name)
        if len(options) < 2:
            continue
        if isinstance(declared, Interval):
            axes.append(Axis(name=name, values=(declared.low, declared.high), is_range=True, is_log=declared.log))
        else:
            axes.append(Axis(name=name, values=tuple(options), is_range=False, is_log=False))
    return axes


def value_order(option: object) -> tuple[bool, float, str]:
    """Numbers by size, then others by name."""
    is_number = isinstance(option, int | float)
    return (not is_number, float(option) if is_number else 0.0, repr(option))


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    objective: str
    axes: tuple[Axis, ...]
    frame: pd.DataFrame
    """The finished proposals."""
    design: np.ndarray
    length: float
    weights: np.ndarray
    mean: float
    skill: float
    error: float
    """Root mean squared error of a left-out proposal, in the objective's unit."""

    def partial(self, name: str) -> list[tuple[object, float]]:
        """(value, mean prediction with the axis set to it) over the axis's grid."""
        axis = next(axis for axis in self.axes if axis.name == name)
        curve = []
        for value in axis.grid():
            columns = [
                other.columns([value] * len(self.frame) if other is axis else self.frame[other.name].tolist())
                for other in self.axes
            ]
            points = np.concatenate(columns, axis=1)
            predicted = self.mean + _kernel(points, self.design, self.length) @ self.weights
            curve.append((value, float(predicted.mean())))
        return curve


def surrogate(frame: pd.DataFrame, search: Search, objective: str) -> Surrogate | None:
    """The fitted surrogate of an objective; None with fewer than MIN_PROPOSALS finished, or no axis that varies."""
    frame = frame[np.isfinite(frame[objective].to_numpy(float))].reset_index(drop=True)
    axes = axes_of(frame, search)
    if len(frame) < MIN_PROPOSALS or not axes:
        return None
    design = np.concatenate([axis.columns(frame[axis.name].tolist()) for axis in axes], axis=1)
    value_N = frame[objective].to_numpy(float)
    mean, spread = float(value_N.mean()), float(value_N.std()) or 1.0
    y_N = (value_N - mean) / spread
    fits = [(length, noise) for length in LENGTHS for noise in NOISES]
    inverses = [np.linalg.inv(_kernel(design, design, length) + noise * np.eye(len(y_N))) for length, noise in fits]
    square_FN = np.array([(inverse @ y_N / np.diag(inverse)) ** 2 for inverse in inverses])
    total_F1 = square_FN.sum(axis=1, keepdims=True)
    best = int(total_F1.argmin())
    squares = float(square_FN[(total_F1 - square_FN).argmin(axis=0), range(len(y_N))].sum())
    n = len(y_N)
    by_mean = float((y_N**2).sum()) * (n / (n - 1)) ** 2
    return Surrogate(
        objective=objective,
        axes=tuple(axes),
        frame=frame,
        design=design,
        length=fits[best][0],
        weights=inverses[best] @ y_N * spread,
        mean=mean,
        skill=1 - squares / by_mean if by_mean else 0.0,
        error=float(np.sqrt(squares / n)) * spread,
    )


def _kernel(u: np.ndarray, v: np.ndarray, length: float) -> np.ndarray:
    distance = ((u[:, None] - v[None]) ** 2).sum(axis=2)
    return np.exp(-distance / (2 * length**2)) + OPEN_MEAN


def importances(frame: pd.DataFrame, search: Search, objective: str) -> dict[str, dict[str, float]]:
    """Evaluator -> axis -> share; the shares of one evaluator sum to 1. Empty with too few proposals, or where
    all have the same value."""
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    frame = frame[np.isfinite(frame[objective].to_numpy(float))]
    axes = axes_of(frame, search)
    if len(frame) < MIN_PROPOSALS or not axes or frame[objective].nunique() == 1:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    better = "maximize" if quantities.sign(objective) > 0 else "minimize"
    study = optuna.create_study(direction=better)
    spaces: dict[str, BaseDistribution] = {
        axis.name: FloatDistribution(0.0, 1.0)
        if axis.is_range
        else CategoricalDistribution([str(option) for option in axis.values])
        for axis in axes
    }
    columns = {
        axis.name: np.clip(axis.columns(frame[axis.name].tolist())[:, 0], 0, 1)
        if axis.is_range
        else [str(plain(value)) for value in frame[axis.name]]
        for axis in axes
    }
    for params, value in zip(pd.DataFrame(columns).to_dict("records"), frame[objective].astype(float), strict=True):
        study.add_trial(optuna.trial.create_trial(params=params, distributions=spaces, value=value))
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        quantile = min(0.5, max(0.1, MIN_BEST / len(frame)))
        evaluators: dict[str, optuna.importance.BaseImportanceEvaluator] = {
            "PED-ANOVA": optuna.importance.PedAnovaImportanceEvaluator(target_quantile=quantile)
        }
        if importlib.util.find_spec("sklearn"):
            evaluators["fANOVA"] = optuna.importance.FanovaImportanceEvaluator(seed=0)
        if len(axes) == 1:
            return {name: {axes[0].name: 1.0} for name in evaluators}
        return {
            name: optuna.importance.get_param_importances(study, evaluator=evaluator)
            for name, evaluator in evaluators.items()
        }


# Text


def search_lines(runs: pd.DataFrame, search: Search, by: str | None = None) -> Iterator[str]:
    """Importance and partial dependence of every axis, for every objective or for `by`."""
    runs = result_rows(runs)
    frame = proposals(runs, search)
    yield f"{search.text}\n{EXPLAINED}"
    for objective in [by] if by in search.objectives else search.objectives:
        finished = int(frame[objective].notna().sum())
        quantity = quantities.IN_RUNS[objective]
        unit = f" [{quantity.unit}]" if quantity.unit not in ("", "1") else ""
        yield f"\n{objective}{unit}, {quantity.better}er is better: {finished} of {len(frame)} proposals finished"
        if caution := degeneracy(objective, score_rows(runs, objective)).text:
            yield f"  {caution}"
        if finished > 1 and frame[objective].nunique() == 1:
            yield "  no analysis: all values are equal"
            continue
        fitted = surrogate(frame, search, objective)
        if fitted is None:
            yield f"  no analysis: it needs {MIN_PROPOSALS} finished proposals and an axis that varies"
            continue
        yield f"  {_skill_text(fitted)}"
        shares = importances(frame, search, objective)
        for axis in fitted.axes:
            importance = ", ".join(f"{name} {by_axis.get(axis.name, 0.0):.0%}" for name, by_axis in shares.items())
            yield f"  {axis.name}: importance {importance}; {_partial_text(fitted, axis.name)}"


def _skill_text(fitted: Surrogate) -> str:
    doubt = ": hardly better than the mean, so importance may be chance, and partial dependence is not shown"
    poor = "" if fitted.skill >= MIN_SKILL else doubt
    return f"left-out proposals: skill {fitted.skill:+.2f}, error {fitted.error:.3g}{poor}"


def _partial_text(fitted: Surrogate, axis: str) -> str:
    if fitted.skill < MIN_SKILL:
        return "partial dependence unreliable"
    curve = fitted.partial(axis)
    sign = quantities.sign(fitted.objective)
    best = max(curve, key=lambda point: sign * point[1])
    worst = min(curve, key=lambda point: sign * point[1])
    return f"partial dependence best at {_value(best[0])} ({best[1]:.4g}), worst at {_value(worst[0])} ({worst[1]:.4g})"


def _value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def search_table(runs: pd.DataFrame, search: Search, by: str | None = None) -> QueryResult:
    """One row per objective, axis and point of its partial dependence."""
    frame = proposals(result_rows(runs), search)
    columns = ("objective", "axis", "ped_anova", "fanova", "value", "partial_dependence", "skill", "error", "proposals")
    rows = []
    for objective in [by] if by in search.objectives else search.objectives:
        fitted, shares = surrogate(frame, search, objective), importances(frame, search, objective)
        if fitted is None:
            continue
        for axis in fitted.axes:
            importance = [shares.get(name, {}).get(axis.name) for name in ("PED-ANOVA", "fANOVA")]
            for value, mean in fitted.partial(axis.name):
                point = (None if value is None else str(value), mean)
                rows.append((objective, axis.name, *importance, *point, fitted.skill, fitted.error, len(fitted.frame)))
    return QueryResult(columns=columns, rows=tuple(rows))
