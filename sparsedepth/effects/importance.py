"""Results of a search: how much each axis matters to each objective, by Optuna, from the rows of its runs.

fANOVA (Hutter, Hoos and Leyton-Brown 2014) fits a random forest to an objective: the importance of an axis is its share
of the variance of what the forest predicts, over the whole space; those of all axes sum to 1. An importance has no
direction: the values of the best proposals are given beside it. A share always exists: of few proposals also an axis
that does nothing has one."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.space import Interval
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.store.degeneracy import Degeneracy, degeneracy, score_rows
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.schema import plain
from sparsedepth.store.search import least_seeds, on_front
from sparsedepth.store.tuning_roles import result_rows
from sparsedepth.words.search import best_values

if TYPE_CHECKING:
    import optuna

MIN_PROPOSALS = 8
"""With fewer there is no analysis."""
BEST_SHARE, MIN_BEST = 0.1, 6
"""The best proposals: this share, and at least so many, but no more than half."""


def proposals(runs: pd.DataFrame, search: SweepDefinition) -> pd.DataFrame:
    """One row per proposal, oldest first: the axes, each objective's mean over seeds (NaN if a seed diverged or ended
    early), n_seeds, on_front."""
    cells = runs.groupby("cell_id", sort=False)
    frame = pd.DataFrame({name: cells[name].first().map(plain) for name in search.varied})
    is_complete = (cells.size() >= least_seeds(search)) & (runs["outcome"] == "ok").groupby(runs["cell_id"]).all()
    for name in search.objectives:
        frame[name] = pd.to_numeric(runs[name]).groupby(runs["cell_id"]).mean().where(is_complete)
    frame = frame.assign(n_seeds=cells.size(), started=cells["started"].min() if "started" in runs else "")
    frame["run_id"] = cells["run_id"].agg(" ".join) if "run_id" in runs else ""
    frame = frame.sort_values("started", kind="stable").reset_index()
    return frame.assign(on_front=on_front(frame[list(search.objectives)].to_numpy(float), search.objectives))


def finished(frame: pd.DataFrame, objective: str) -> pd.DataFrame:
    """The proposals with a value of the objective."""
    return frame[np.isfinite(frame[objective].to_numpy(float))].reset_index(drop=True)


def options_of(frame: pd.DataFrame, search: SweepDefinition) -> dict[str, list]:
    """The axes that take several values, each with these in order."""
    values = {name: sorted({plain(value) for value in frame[name].tolist()}, key=value_order) for name in search.varied}
    return {name: options for name, options in values.items() if len(options) > 1}


def value_order(option: object) -> tuple[bool, float, str]:
    """Numbers by size, then others by name."""
    is_number = isinstance(option, int | float)
    return (not is_number, float(option) if is_number else 0.0, repr(option))


def study_of(frame: pd.DataFrame, search: SweepDefinition, objective: str) -> "optuna.Study":
    """A study in memory of one objective: a trial for each proposal that has its value, in order, with the axes that
    take several values. A field that a proposal does not have is no parameter of its trial."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    frame, axes = finished(frame, objective), search.axes
    spaces = {name: _distribution(options, axes.get(name)) for name, options in options_of(frame, search).items()}
    study = optuna.create_study(direction="maximize" if quantities.sign(objective) > 0 else "minimize")
    for proposal in frame.to_dict("records"):
        params = {
            name: float(proposal[name]) if isinstance(axes.get(name), Interval) else _choice(plain(proposal[name]))
            for name, space in spaces.items()
            if plain(proposal[name]) is not None or None in getattr(space, "choices", ())
        }
        value, of_params = float(proposal[objective]), {name: spaces[name] for name in params}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=of_params, value=value))
    return study


def _distribution(options: list, axis: Any) -> "optuna.distributions.BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if isinstance(axis, Interval):
        known = [float(value) for value in options if value is not None]
        low, high = min(axis.low, *known), max(axis.high, *known)  # proposals of a narrower, earlier definition
        return FloatDistribution(low, high, log=axis.log)
    takes_null = axis is not None and None in axis
    return CategoricalDistribution([_choice(value) for value in options if value is not None or takes_null])


def _choice(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)


class Importance(NamedTuple):
    axis: str
    fanova: float | None
    """None where some proposals do not have the axis."""
    best: str
    """The values of the axis among the best proposals."""


def importances(frame: pd.DataFrame, search: SweepDefinition, objective: str) -> list[Importance]:
    """Of each axis, the most important first. Empty with too few proposals, or where all have the same value."""
    import optuna

    frame = finished(frame, objective)
    options = options_of(frame, search)
    if len(frame) < MIN_PROPOSALS or not options or frame[objective].nunique() == 1:
        return []
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    shares = optuna.importance.get_param_importances(study_of(frame, search, objective), evaluator=evaluator)
    ordered = frame.sort_values(objective, ascending=quantities.sign(objective) < 0)
    n, axes = n_best(len(frame)), search.axes
    found = [
        Importance(
            name,
            shares.get(name),
            best_values([*map(plain, ordered[name])], n, isinstance(axes.get(name), Interval)),
        )
        for name in options
    ]
    return sorted(found, key=lambda each: -(each.fanova or 0.0))


def n_best(n: int) -> int:
    return math.ceil(min(n / 2, max(BEST_SHARE * n, MIN_BEST)))


class OfObjective(NamedTuple):
    """What each axis does to an objective, and how many proposals tell it."""

    objective: str
    n_finished: int
    n_proposals: int
    degeneracy: Degeneracy
    is_constant: bool
    importances: Sequence[Importance]
    min_proposals: int = MIN_PROPOSALS

    @property
    def n_best(self) -> int:
        return n_best(self.n_finished)


def by_objective(runs: pd.DataFrame, search: SweepDefinition, by: str | None = None) -> list[OfObjective]:
    """The importance of every axis, for every objective or for `by`."""
    runs = result_rows(runs)
    frame = proposals(runs, search)
    found = []
    for objective in [by] if by in search.objectives else search.objectives:
        n, judged = len(finished(frame, objective)), degeneracy(objective, score_rows(runs, objective))
        is_constant = n > 1 and frame[objective].nunique() == 1
        found.append(OfObjective(objective, n, len(frame), judged, is_constant, importances(frame, search, objective)))
    return found


def search_table(found: Sequence[OfObjective]) -> QueryResult:
    """One row per objective and axis."""
    columns = ("objective", "axis", "fanova", "best_values", "proposals")
    rows = [(of.objective, *each, of.n_finished) for of in found for each in of.importances]
    return QueryResult(columns=columns, rows=tuple(rows))
