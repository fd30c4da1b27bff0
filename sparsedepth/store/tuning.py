"""Which runs stand for a configuration: one rule for `best`, saved questions, effects, figures and the depth law.

A row of `runs` stands for a configuration where it was trained (a model that was only measured has no knobs; `best`
alone ranks it beside them), was not rejected in tuning, and its seed is not one of tuning alone.

A *cell* is every RunConfig field but the seed, a *configuration* a cell less its tuned fields. Its best value is the
one with the lowest mean loss (the first objective) over the tuning seeds; a diverged run is the worst, and a value that
lacks some of the tuning's runs is not chosen while others have them. Derived from the runs alone, by the results
folder's sweep.yaml: nothing is stored.

    best      a run at the best value, which has a worse one on either side
    edge      a run at the best value, which is the lowest or highest of those tried: the true best may lie beyond
    rejected  a run at another value: no result of its configuration, and in no comparison
    tuning    a run at the best value with a seed that only chose it: no result either, since the choice flatters it
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from sparsedepth import quantities
from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.config.sweep import DEFINITION, read_definition
from sparsedepth.store.table_map import MAP, TableMap

if TYPE_CHECKING:
    import pandas as pd

TuningRole = Literal["best", "edge", "rejected", "tuning"]
Point = tuple[float, ...]
"""A value for each tuned field."""

IS_TRAINED = "model IS NULL"
IS_CHOSEN = "coalesce(tuning NOT IN ('rejected', 'tuning'), true)"
STANDS = f"{IS_TRAINED} AND {IS_CHOSEN}"
"""The rule as an SQL condition over `runs`; `standing` is the same over a frame."""


def standing(runs: "pd.DataFrame") -> "pd.DataFrame":
    """The rows of `runs` that stand for a configuration."""
    return chosen(trained(runs))


def trained(runs: "pd.DataFrame") -> "pd.DataFrame":
    """Without models that were only measured; with the values that were only tried in tuning."""
    return runs[runs["model"].isna()] if "model" in runs.columns else runs


def chosen(runs: "pd.DataFrame") -> "pd.DataFrame":
    """Without the runs of tuning alone and the values that it rejected; with models that were only measured."""
    return runs[~runs["tuning"].isin(["rejected", "tuning"])] if "tuning" in runs.columns else runs


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a sweep tunes, and by what."""

    fields: tuple[str, ...]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    """of the results; empty for imported runs, of which any seed is one of tuning and of results"""
    objective: str

    @property
    def columns(self) -> tuple[str, ...]:
        """What `tuning_roles` reads of `runs`."""
        return tuple(dict.fromkeys(("run_id", "outcome", self.objective, *RunConfig.model_fields)))


def read_tuned(results: Path) -> Tuned | None:
    """What the sweep of a results folder tunes; None where it tunes nothing, or no sweep fills the folder.

    Raises ValueError for a sweep.yaml that tunes and is no definition.
    """
    path = results / DEFINITION
    if (results / MAP).is_file():
        table_map = build(TableMap, read_yaml(results / MAP), str(results / MAP))
        imported = Tuned(fields=tuple(table_map.tuned), tuning_seeds=(), seeds=(), objective=table_map.objective)
        return imported if table_map.tuned else None
    if not path.is_file() or "tune" not in read_yaml(path):
        return None
    definition = read_definition(results)
    if definition is None or not definition.tune:
        return None
    return Tuned(
        fields=tuple(definition.tune),
        tuning_seeds=tuple(definition.tuning_seeds),
        seeds=tuple(definition.result_seeds),
        objective=definition.objective,
    )


def tuning_roles(tuned: Tuned, runs: Sequence[Mapping[str, Any]]) -> dict[str, TuningRole]:
    """run_id -> its role. A configuration that was tried at one value only has none: it was not tuned."""
    held = [name for name in CELL_FIELDS if name not in tuned.fields]
    groups = defaultdict(list)
    for run in runs:
        groups[tuple(repr(run[name]) for name in held)].append(run)
    by_run: dict[str, TuningRole] = {}
    for group in groups.values():
        only_tuned = {run["run_id"] for run in group if run["seed"] in {*tuned.tuning_seeds} - {*tuned.seeds}}
        by_run |= dict.fromkeys(only_tuned, "tuning")
        losses = _mean_losses(tuned, group)
        if len(losses) < 2:
            continue
        best, at_edge = best_point(losses)
        role: TuningRole = "edge" if any(at_edge) else "best"
        for run in group:
            if _point(tuned, run) != best:
                by_run[run["run_id"]] = "rejected"
            elif run["run_id"] not in only_tuned:
                by_run[run["run_id"]] = role
    return by_run


def _mean_losses(tuned: Tuned, group: Sequence[Mapping[str, Any]]) -> dict[Point, float]:
    """The mean loss of each value over the tuning seeds; math.inf where one diverged, or fewer were run than elsewhere.

    A configuration none of whose runs has a tuning seed was tuned before there were any: with the first seed.
    """
    seeds = [seed for seed in tuned.tuning_seeds if any(run["seed"] == seed for run in group)] or tuned.seeds[:1]
    seeds = seeds or list(dict.fromkeys(run["seed"] for run in group))
    losses: dict[Point, dict[int, float]] = defaultdict(dict)
    for run in group:
        if run["seed"] in seeds:
            loss = run[tuned.objective]
            is_ok = run["outcome"] == "ok" and loss is not None
            losses[_point(tuned, run)][run["seed"]] = -quantities.sign(tuned.objective) * loss if is_ok else math.inf
    most = max(map(len, losses.values()), default=0)
    return {
        point: fmean(by_seed[seed] for seed in seeds if seed in by_seed) if len(by_seed) == most else math.inf
        for point, by_seed in losses.items()
    }


def best_point(losses: Mapping[Point, float]) -> tuple[Point, tuple[bool, ...]]:
    """The point of the lowest loss (of equals the lowest values), and for each field whether its value is the lowest
    or highest of those tried. The loss of a point that diverged is math.inf."""
    best = min(sorted(losses), key=lambda point: losses[point])
    tried = zip(*losses, strict=True)
    return best, tuple(value in (min(values), max(values)) for value, values in zip(best, tried, strict=True))


def _point(tuned: Tuned, run: Mapping[str, Any]) -> Point:
    return tuple(run[name] for name in tuned.fields)
