"""Which runs stand for a configuration: one rule for `best`, saved questions, effects, figures and the depth law.

A row of `runs` stands for a configuration where it was trained (a model that was only measured has no knobs; `best`
alone ranks it beside them) and was not rejected in tuning.

A *cell* is every RunConfig field but the seed, a *configuration* a cell less its tuned fields. Its best value is the
one with the lowest loss (the first objective) at the sweep's first seed; a diverged run is the worst. Derived from the
runs alone, by the results folder's sweep.yaml: nothing is stored.

    best      a run at the best value, which has a worse one on either side
    edge      a run at the best value, which is the lowest or highest of those tried: the true best may lie beyond
    rejected  a run at another value: no result of its configuration, and in no comparison
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparsedepth import quantities
from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.config.sweep import DEFINITION, SweepDefinition

if TYPE_CHECKING:
    import pandas as pd

TuningRole = Literal["best", "edge", "rejected"]
Point = tuple[float, ...]
"""A value for each tuned field."""

IS_TRAINED = "model IS NULL"
IS_CHOSEN = "tuning IS DISTINCT FROM 'rejected'"
STANDS = f"{IS_TRAINED} AND {IS_CHOSEN}"
"""The rule as an SQL condition over `runs`; `standing` is the same over a frame."""


def standing(runs: "pd.DataFrame") -> "pd.DataFrame":
    """The rows of `runs` that stand for a configuration."""
    return chosen(trained(runs))


def trained(runs: "pd.DataFrame") -> "pd.DataFrame":
    """Without models that were only measured; with the values that were only tried in tuning."""
    return runs[runs["model"].isna()] if "model" in runs.columns else runs


def chosen(runs: "pd.DataFrame") -> "pd.DataFrame":
    """Without the values that tuning tried and rejected; with models that were only measured."""
    return runs[runs["tuning"] != "rejected"] if "tuning" in runs.columns else runs


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a sweep tunes, and by what."""

    fields: tuple[str, ...]
    seed: int
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
    if not path.is_file() or "tune" not in (values := read_yaml(path)):
        return None
    definition = build(SweepDefinition, values, str(path))
    if not definition.tune:
        return None
    return Tuned(fields=tuple(definition.tune), seed=definition.seeds[0], objective=definition.objective)


def tuning_roles(tuned: Tuned, runs: Sequence[Mapping[str, Any]]) -> dict[str, TuningRole]:
    """run_id -> its role. A configuration that was tried at one value only has none: it was not tuned."""
    sign = -quantities.sign(tuned.objective)
    held = [name for name in CELL_FIELDS if name not in tuned.fields]
    groups = defaultdict(list)
    for run in runs:
        groups[tuple(repr(run[name]) for name in held)].append(run)
    by_run: dict[str, TuningRole] = {}
    for group in groups.values():
        losses = {
            _point(tuned, run): sign * run[tuned.objective]
            if run["outcome"] == "ok" and run[tuned.objective] is not None
            else math.inf
            for run in group
            if run["seed"] == tuned.seed
        }
        if len(losses) < 2:
            continue
        best, at_edge = best_point(losses)
        role: TuningRole = "edge" if any(at_edge) else "best"
        by_run |= {run["run_id"]: role if _point(tuned, run) == best else "rejected" for run in group}
    return by_run


def best_point(losses: Mapping[Point, float]) -> tuple[Point, tuple[bool, ...]]:
    """The point of the lowest loss (of equals the lowest values), and for each field whether its value is the lowest
    or highest of those tried. The loss of a point that diverged is math.inf."""
    best = min(sorted(losses), key=lambda point: losses[point])
    tried = zip(*losses, strict=True)
    return best, tuple(value in (min(values), max(values)) for value, values in zip(best, tried, strict=True))


def _point(tuned: Tuned, run: Mapping[str, Any]) -> Point:
    return tuple(run[name] for name in tuned.fields)
