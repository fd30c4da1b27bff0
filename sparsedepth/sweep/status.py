"""State of a sweep's runs, and its summary, read only from its folder: no lock, no study, no torch; on any machine."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, get_args

from sparsedepth import quantities
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.config.section import Fields
from sparsedepth.config.sweep import SweepDefinition, readable_definition
from sparsedepth.plan.tasks import Plan
from sparsedepth.quantities.quantity import Named
from sparsedepth.run.lease import is_held
from sparsedepth.run.scratch import Allocation, Progress, Scratch, node_hours, trunk_folder
from sparsedepth.store.cache import read_columns
from sparsedepth.store.checksums import DamagedRun
from sparsedepth.store.degeneracy import columns_for, usable_form
from sparsedepth.store.made_with import version_differences
from sparsedepth.store.packs import is_complete_run
from sparsedepth.store.setting import Configuration, Settings, configuration_of, settings_of
from sparsedepth.store.tuning_roles import objective_as_loss
from sparsedepth.sweep.results_folder import SWEEP_LEASES, EndState, ResultsIndex, run_ids
from sparsedepth.words.degeneracy import caution
from sparsedepth.words.differences import setting_label
from sparsedepth.words.plain_text import commas
from sparsedepth.words.runs import version_text
from sparsedepth.words.values import assignment

State = Literal["complete", "running", "interrupted", "planned", "damaged"] | EndState
WITHOUT_RESULT = (*get_args(EndState), "damaged")


@dataclass(frozen=True, kw_only=True)
class RunState:
    run_id: str
    state: State
    progress: Progress | None = None
    reason: str | None = None
    """why it ended without a result; of a run that is to be computed again: why it failed last"""
    config: RunConfig | None
    starts: Sequence[Allocation] = ()
    """of an incomplete run: the Slurm tasks that computed it"""

    @property
    def done(self) -> float:
        """Share of the run that is done, 0 to 1."""
        if self.state == "complete":
            return 1.0
        return self.progress.done if self.progress and self.state != "planned" else 0.0


def state_of(index: ResultsIndex, run_id: str, config: RunConfig | None = None) -> RunState:
    """What a run's lock and records in its folder say."""
    if run_id in index.complete or is_complete_run(index.results, run_id):
        return RunState(run_id=run_id, state="complete", config=config)
    scratch = Scratch(index.results, run_id)
    state = "planned"
    reason = None
    if is_held(scratch.lock):
        state = "running"
    elif end := index.recorded_end(scratch):
        state, reason = end
    elif failures := scratch.recorded().failures:
        state = "interrupted"
        reason = failures[-1]
    elif scratch.checkpoints.exists():
        state = "interrupted"
    progress = scratch.progress()
    starts = scratch.allocations()
    return RunState(run_id=run_id, state=state, progress=progress, reason=reason, config=config, starts=starts)


def remaining_and_trunks(
    plan: Plan, results: Path, max_attempts: int | None = None
) -> tuple[list[RunConfig], list[RunConfig]]:
    """The expected runs of a sweep that are neither complete in `results` nor ended without a result, and the complete
    ones whose trunk is still there for others; of an adaptive sampler none, whose proposals are unknown."""
    index = ResultsIndex(results, plan.definition, max_attempts)
    if plan.definition.adaptive:  # so runs that have ended are only counted
        ended = run_ids(results, "runs") | set(filter(index.end, run_ids(results, "work")))
        return plan.expected_runs()[len(ended) :], []
    runs = plan.expected_runs(index.loss_of)
    remaining = [run for run in runs if index.loss_of(run.run_id) is None]
    with_trunk = (run for run in runs if (trunk := trunk_folder(results, run)) and trunk.is_dir())
    return remaining, [run for run in with_trunk if index.is_complete(run.run_id)]


def scan(index: ResultsIndex, planned: Mapping[str, RunConfig] | None = None) -> list[RunState]:
    """The state of every known run of the folder. `planned` are the definition's runs, for a caller that scans
    repeatedly: building them takes most of the time."""
    results = index.results
    definition = index.definition
    if planned is None:
        planned = Plan(definition).configs(index.loss_of) if definition else {}
    here = run_ids(results, "runs") | run_ids(results, "work")
    is_grid = definition is not None and not definition.adaptive
    others = [] if is_grid else sorted(here - {*planned})  # else of an earlier version of the definition
    states = [
        state_of(index, run_id, config) if run_id in here else RunState(run_id=run_id, state="planned", config=config)
        for run_id, config in [*planned.items(), *((run_id, None) for run_id in others)]
    ]
    # `train` that was stopped before its first checkpoint has nothing to resume.
    return [state for state in states if definition is not None or state.state != "planned"]


def forget_failures(results: Path, definition: SweepDefinition, max_attempts: int) -> None:
    """Forget the failures of all runs that are not being computed, and what did not fit into memory."""
    for state in scan(ResultsIndex(results, definition, max_attempts)):
        if state.state != "running":
            Scratch(results, state.run_id).clear_failures()


def varied_fields(definition: SweepDefinition, config: RunConfig) -> Fields:
    """What a run differs in from the others: depth, tuned and searched fields, others if not the base's."""
    always = {"n_layers", "seed", *definition.tune, *(definition.varied if definition.is_search else ())}
    try:
        base = definition.run_config({}, config.seed)
    except ValueError:  # not every base is a whole run
        base = None
    order = sorted(definition.varied, key=lambda name: (name in definition.tune, name != "n_layers"))
    values = {name: getattr(config, name) for name in (*order, "seed")}
    return {name: value for name, value in values.items() if name in always or value != getattr(base, name, None)}


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
    is_beaten: bool
    """By another run of the folder, which is not of the definition."""


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    definition: SweepDefinition | None
    states: list[RunState]
    expected: int
    """runs of the definition, those at values that tuning has yet to settle too; of an adaptive sampler at most"""
    best: BestRun | None
    node_hours: float | None
    """used by all runs on Slurm, including incomplete ones; None without Slurm"""
    is_swept: bool
    """whether a process of the sweep is alive, which may propose more runs"""
    n_diverged: int
    judgements: tuple[str, ...]
    """what the rows say of the objectives' form, and of the packages that computed them"""
    n_others: int
    """complete runs of the folder that are not in the definition"""

    @property
    def is_grid(self) -> bool:
        return self.definition is None or not self.definition.adaptive

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
        may_propose = not self.is_grid and (self.is_swept or not self.states)
        return may_propose or any(state.state in ("running", "interrupted", "planned") for state in self.states)


@dataclass(frozen=True)
class _FolderRows:
    """The rows of a folder's complete runs, and their first objective as a loss."""

    definition: SweepDefinition | None
    objective: str
    objectives: Sequence[str]
    rows: dict[str, Named]
    losses: dict[str, float]
    problems: dict[str, str]
    """of each damaged run"""

    def results(self, rows: Iterable[Named]) -> list[Named]:
        """The rows of result seeds."""
        definition = self.definition
        tuning_only = {*definition.tuning_seeds} - {*definition.result_seeds} if definition else set()
        return [row for row in rows if row["seed"] not in tuning_only]


def sweep_summary(folder: Path) -> SweepSummary:
    """The summary of a sweep's folder. Raises ValueError for a damaged definition."""
    of = _read(folder)
    plan = Plan(of.definition) if of.definition else None
    rows = of.rows.values()
    index = ResultsIndex(folder, of.definition)
    configs = _planned(index, plan, of.losses) if plan else {}
    states = [
        replace(state, state="damaged", reason=problem) if (problem := of.problems.get(state.run_id)) else state
        for state in scan(index, configs)
    ]
    judgements = [caution(usable_form(name, of.results(rows))) for name in of.objectives]
    judgements.append(version_text(version_differences(row["packages"] for row in rows)))
    hours = [row["node_hours"] for row in rows if row["node_hours"] is not None]
    hours += [node_hours(state.starts) for state in states if state.starts]
    return SweepSummary(
        node_hours=sum(hours) if hours else None,
        definition=of.definition,
        states=states,
        is_swept=any(map(is_held, folder.glob(SWEEP_LEASES))),
        expected=len(configs) or (plan.expected if plan else len(states)),
        best=_best(of, states, [*configs.values()]),
        n_diverged=sum(row["outcome"] == "diverged" for row in rows),
        judgements=tuple(filter(None, judgements)),
        n_others=len({*of.rows} - {state.run_id for state in states}),
    )


def _read(folder: Path) -> _FolderRows:
    definition = readable_definition(folder)
    damaged = list[DamagedRun]()
    objective = quantities.rankable(definition.objective).name if definition else "val_loss"
    objectives = definition.objectives if definition else (objective,)
    judged = {column for name in objectives for column in (name, *columns_for(name))}
    facts = ("outcome", "packages", "node_hours", "cell_id", "seed")
    rows = read_columns(folder, {*CELL_FIELDS, *judged, *facts}, damaged)
    losses = {run_id: objective_as_loss(row, objective) for run_id, row in rows.items()}
    problems = {damage.folder.name: f"{damage.name} {damage.problem}" for damage in damaged}
    return _FolderRows(definition, objective, objectives, rows, losses, problems)


def _planned(index: ResultsIndex, plan: Plan, losses: Mapping[str, float]) -> dict[str, RunConfig]:
    """The expected runs by run_id, given the losses of the complete ones; none of an adaptive sampler."""

    def loss_of(run_id: str) -> float | None:
        return math.inf if run_id not in losses and index.end(run_id) else losses.get(run_id)

    runs = [] if plan.definition.adaptive else plan.expected_runs(loss_of)
    return {config.run_id: config for config in runs}


def _best(of: _FolderRows, states: list[RunState], planned: Sequence[RunConfig]) -> BestRun | None:
    """Of the definition's runs: a result, or before there is one a run of tuning."""
    losses = of.losses
    rows = of.rows
    complete = [state.run_id for state in states if math.isfinite(losses.get(state.run_id, math.inf))]
    results = [run_id for run_id in complete if of.results([rows[run_id]])]
    if of.definition is None or not complete:
        return None
    run_id = min(results or complete, key=lambda run_id: (losses[run_id], run_id))
    row = rows[run_id]
    finished = [other for name, other in rows.items() if math.isfinite(losses[name])]
    replicates = [other for other in finished if other["cell_id"] == row["cell_id"]]
    values = [other[of.objective] for other in of.results(replicates) or replicates]
    others = {*rows} - {state.run_id for state in states}
    knobs = {name: row[name] for name in CELL_FIELDS}
    if of.definition.is_search:  # has no baseline
        named = [assignment(name, knobs[name]) for name in of.definition.varied if name != "n_layers"]
    else:
        named = [setting_label(_settings(rows, of.definition, planned), knobs)]
    return BestRun(
        objective=of.objective,
        value=row[of.objective],
        run_id=run_id,
        label=commas([f"n_layers={row['n_layers']}", *named, f"seed {row['seed']}"]),
        mean=fmean(values),
        n_seeds=len(values),
        is_of_tuning=not results,
        is_beaten=any(losses[other] < losses[run_id] for other in others),
    )


def _settings(rows: Mapping[str, Fields], definition: SweepDefinition, planned: Sequence[RunConfig]) -> Settings:
    """What differs among the rows and the planned runs."""
    knobs = {row["cell_id"]: {name: row[name] for name in CELL_FIELDS} for row in rows.values()}
    tuned = frozenset(definition.tune)
    cells = [Configuration(cell_id=cell_id, tuned=tuned, knobs=fields) for cell_id, fields in knobs.items()]
    of_cell = {config.cell: config for config in planned}
    of_plan = {config.cell_id: configuration_of(config, definition.tune) for config in of_cell.values()}
    return settings_of(cells, list(of_plan.values()))
