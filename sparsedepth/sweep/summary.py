"""Summary of a sweep for `status` and `report --watch`: runs by state, and the best so far."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, get_args

from sparsedepth import quantities
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.config.sweep import SweepDefinition, read_definition
from sparsedepth.plan.tasks import Plan
from sparsedepth.run.allocation import node_hours
from sparsedepth.store.cache import read_columns
from sparsedepth.store.checksums import DamagedRun
from sparsedepth.store.degeneracy import columns_for, degeneracy_note
from sparsedepth.store.packages import version_differences
from sparsedepth.store.setting import Configuration, configuration_of, settings_of
from sparsedepth.store.terminal import duration
from sparsedepth.store.tuning_roles import objective_as_loss
from sparsedepth.sweep.run_end import EndState, end_rule
from sparsedepth.sweep.status import RunState, State, is_silent, other_runs_note, scan, without_result

WITHOUT_RESULT = (*get_args(EndState), "damaged")


class BestRun(NamedTuple):
    """The best single run, which may owe its rank to its seed, with the mean of its configuration."""

    objective: str
    value: float
    run_id: str
    label: str
    """'n_layers=24, baseline, seed 0'"""
    mean: float
    n_seeds: int
    """Seeds of its configuration with a value."""
    is_of_tuning: bool
    """Before there is a result."""
    among: str
    """' of this definition' where another run of the folder is better; else empty."""

    @property
    def text(self) -> str:
        """'lowest single run: val_loss 0.1351 (n_layers=24, baseline, seed 0; mean of its 3 seeds 0.2832)'."""
        lowest = "lowest" if quantities.IN_RUNS[self.objective].better == "low" else "highest"
        others = f"mean of its {self.n_seeds} seeds {self.mean:.4g}" if self.n_seeds > 1 else "its only seed"
        run = f"{'tuning' if self.is_of_tuning else 'single'} run{self.among}"
        return f"{lowest} {run}: {self.objective} {self.value:.4g} ({self.label}; {others})"


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    definition: SweepDefinition | None
    states: list[RunState]
    expected: int
    """runs of the definition, those at values that tuning has yet to choose included; for an adaptive sampler an upper
    bound"""
    best: BestRun | None
    node_hours: float | None
    """used by all runs on Slurm, including incomplete ones; None without Slurm"""
    remarks: tuple[str, ...]
    """diverged runs, degenerate objectives, differing packages, other complete runs"""

    @property
    def is_grid(self) -> bool:
        return self.definition is None or not self.definition.adaptive

    @property
    def counts_text(self) -> str:
        """'3 complete, 1 running, 0 interrupted, 0 failed, 5 planned'; of an adaptive sampler, whose proposals are
        unknown, without 'planned', but at most how many there will be."""
        counts = self.counts
        shown: list[State] = ["complete", "running", "interrupted", "failed"]
        shown += [state for state in ("infeasible", "pruned", "damaged") if counts[state]]
        shown += ["planned"] * self.is_grid
        counts["planned"] += self.expected - len(self.states)  # at values that tuning has yet to choose
        at_most = "" if self.is_grid else f" (at most {self.expected} in total; equal proposals share their runs)"
        return ", ".join(f"{counts[state]} {state}" for state in shown) + at_most

    @property
    def counts(self) -> Counter[State]:
        return Counter(state.state for state in self.states)

    @property
    def ended(self) -> Counter[tuple[State, str | None]]:
        return Counter((state.state, state.reason) for state in self.states if state.state in WITHOUT_RESULT)

    @property
    def share(self) -> float:
        """Share of the runs that are done, 0 to 1; a run that ended without a result counts as done."""
        done = sum(1.0 if state.state in WITHOUT_RESULT else state.done for state in self.states)
        return done / max(self.expected, len(self.states), 1)

    @property
    def is_left(self) -> bool:
        return any(state.state in ("running", "interrupted", "planned") for state in self.states)


def sweep_summary(folder: Path) -> SweepSummary:
    """The summary of a sweep's folder. Raises ValueError for a damaged definition."""
    definition = read_definition(folder)
    objective = quantities.rankable(definition.objective).name if definition else "val_loss"
    damaged: list[DamagedRun] = []
    facts = ("outcome", "packages", "node_hours", "cell_id", "seed")
    objectives = definition.objectives if definition else (objective,)
    judged = {column for name in objectives for column in (name, *columns_for(name))}
    rows = read_columns(folder, {*CELL_FIELDS, *judged, *facts}, damaged)
    plan = Plan(definition) if definition else None
    losses = {run_id: objective_as_loss(row, objective) for run_id, row in rows.items()}

    has_ended = without_result(folder, end_rule(folder, definition))

    def loss_of(run_id: str) -> float | None:
        if run_id in losses:
            return losses[run_id]
        return math.inf if has_ended(run_id) else None

    configs = [planned.config for planned in plan.runs(loss_of)] if plan else []
    problems = {damage.folder.name: f"{damage.name} {damage.problem}" for damage in damaged}
    states = [
        replace(state, state="damaged", reason=problems[state.run_id]) if state.run_id in problems else state
        for state in scan(folder, definition, configs)
    ]
    n_diverged = sum(row["outcome"] == "diverged" for row in rows.values())
    remarks = (
        f"{n_diverged} of the complete runs diverged: `query --ask diverged` lists them" if n_diverged else "",
        *(degeneracy_note(name, _results(definition, rows.values())) for name in objectives),
        version_differences(row["packages"] for row in rows.values()),
        other_runs_note(rows, states),
    )
    hours = [row["node_hours"] for row in rows.values() if row["node_hours"] is not None]
    hours += [node_hours(state.starts) for state in states if state.starts]
    return SweepSummary(
        node_hours=sum(hours) if hours else None,
        definition=definition,
        states=states,
        expected=(len(configs) + len(plan.results_to_come(loss_of)) or plan.expected) if plan else len(states),
        best=_best(definition, objective, states, losses, rows, configs),
        remarks=tuple(remark for remark in remarks if remark),
    )


def running_line(state: RunState, name: str) -> str:
    """A running run's phase, share done, loss and estimated time left."""
    if state.progress is None:
        return f"{name}: starting"
    parts = [state.progress.phase, f"{state.progress.done:.0%}"]
    if state.progress.loss is not None:
        parts.append(f"loss {state.progress.loss:.3f}")
    if state.progress.left is not None:
        parts.append(f"about {duration(state.progress.left)} left")
    return f"{name}: {', '.join(parts)}" + " (no output for minutes)" * is_silent(state.progress)


def _results(definition: SweepDefinition | None, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of result seeds."""
    tuning_only = {*definition.tuning_seeds} - {*definition.result_seeds} if definition else set()
    return [row for row in rows if row["seed"] not in tuning_only]


def _best(
    definition: SweepDefinition | None,
    objective: str,
    states: list[RunState],
    losses: dict[str, float],
    rows: dict[str, dict[str, Any]],
    planned: Sequence[RunConfig],
) -> BestRun | None:
    """Of the definition's runs: a result, or before there is one a run of tuning."""
    complete = [state.run_id for state in states if math.isfinite(losses.get(state.run_id, math.inf))]
    results = [run_id for run_id in complete if _results(definition, [rows[run_id]])]
    if definition is None or not complete:
        return None
    run_id = min(results or complete, key=lambda run_id: (losses[run_id], run_id))
    row = rows[run_id]
    finished = [other for name, other in rows.items() if math.isfinite(losses.get(name, math.inf))]
    replicates = [other for other in finished if other["cell_id"] == row["cell_id"]]
    values = [other[objective] for other in _results(definition, replicates) or replicates]
    cells: dict[str, Configuration] = {}
    for other in rows.values():
        knobs, tuned = {name: other[name] for name in CELL_FIELDS}, frozenset(definition.tune)
        cells[other["cell_id"]] = Configuration(cell_id=other["cell_id"], tuned=tuned, knobs=knobs)
    of_cell = {config.cell: config for config in planned}
    of_plan = {config.cell_id: configuration_of(config, definition.tune) for config in of_cell.values()}
    setting = settings_of(list(cells.values()), list(of_plan.values())).label(cells[row["cell_id"]].knobs)
    label = f"n_layers={row['n_layers']}, {setting}, seed {row['seed']}"
    others = {*rows} - {state.run_id for state in states}
    among = " of this definition" if any(losses[other] < losses[run_id] for other in others) else ""
    return BestRun(objective, row[objective], run_id, label, fmean(values), len(values), not results, among)
