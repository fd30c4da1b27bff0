"""The Optuna study of a sweep, as sampler and queue. The run folders are the record.

Every task is an enqueued trial, so all workers share one queue. The trial of a worker that died or was stopped returns
to the queue unchanged, with its number and proposal. Trials are taken in order of their numbers, and a sampler's seed
depends only on the proposal, so that a single worker proposes the same points however often it is killed.

A study that was deleted, or lacks runs that were finished elsewhere, is rebuilt from the folders (`rebuild`). Proposals
without any run (infeasible ones) leave no folder, and are proposed again."""

import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import cell_digest, in_axis
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.files import digest
from sparsedepth.measure.bootstrap import complete_mean
from sparsedepth.plan.propose import distributions, plain, suggest, untried
from sparsedepth.plan.tasks import Plan, Task, broken_constraints, constraint_excess, random_proposals
from sparsedepth.run.lease import is_held, last_heartbeat
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import run_record
from sparsedepth.sweep.results_folder import ResultsIndex

SETTLED = (TrialState.COMPLETE, TrialState.PRUNED)

ConfigAndSummary = tuple[RunConfig, Mapping[str, Any] | None]
"""A run and its summary; None if it was pruned."""

SHOWN = ("val_loss", "usefulness", "train_flops", "params_total")
"""Quantities stored with a trial in addition to its objectives, for a dashboard."""


class RepeatError(Exception):
    """A proposal that repeats another one, and is replaced."""


def task_of(trial: optuna.Trial | FrozenTrial) -> Task | None:
    """The task of a trial; None for a trial of another program."""
    content = trial.user_attrs.get("task")
    return Task(**content) if content else None


def configs_of(trial: optuna.Trial, task: Task, definition: SweepDefinition) -> list[RunConfig]:
    """The runs of a trial: the task's own cell, passed to Optuna as parameters, or the sampler's proposal.

    Raises TrialPruned if the cell is excluded, cannot be built or breaks a constraint (the sampler learns by how much),
    RepeatError if another proposal is the same."""
    axes = distributions(definition)
    if task.cell is not None:
        cell = task.cell
        for name in cell:
            suggest(trial, name, axes[name])
    else:
        # Axes under `only` are suggested last, and only if the other fields of the cell allow them.
        point = {name: suggest(trial, name, axis) for name, axis in axes.items() if name not in definition.only}
        later = [*definition.only]
        while name := next((name for name in later if name in definition.cell({**point, name: None})), ""):
            later.remove(name)
            point[name] = suggest(trial, name, axes[name])
        cell = definition.cell(point)
    trial.set_user_attr("cell", cell)
    check_repeat(trial, task)
    infeasible = "it is excluded" if task.cell is None and definition.is_excluded(cell) else ""
    configs: list[RunConfig] = []
    if not infeasible:
        try:
            configs = [definition.run_config(cell, seed) for seed in task.seeds]
        except ValueError as error:
            infeasible = str(error)
    constrain(trial, "buildable", 1.0 if infeasible else 0.0)
    if configs:
        for name, excess in constraint_excess(definition, configs[0]).items():
            constrain(trial, name, excess)
        infeasible = broken_constraints(definition, configs[0])
    if infeasible:
        trial.set_user_attr("infeasible", infeasible)
        raise optuna.TrialPruned(infeasible)
    return configs


def constrain(trial: optuna.Trial, name: str, excess: float) -> None:
    """Tell the sampler by how much a constraint is exceeded (above 0); only the first value counts."""
    if name not in trial.constraints:
        trial.set_constraint(name, excess)


def check_repeat(trial: optuna.Trial, task: Task) -> None:
    """Raises RepeatError if an earlier proposal has the same cell; also called after the runs, of which two may tie."""
    if task.cell is not None:
        return
    cell = cell_digest(trial.user_attrs["cell"])
    for other in trial.study.get_trials(deepcopy=False)[: trial.number]:
        other_task, other_cell = task_of(other), other.user_attrs.get("cell")
        counts = other_task and other_task.key != task.key and other.state != TrialState.FAIL
        if counts and other_cell is not None and cell_digest(other_cell) == cell:
            raise RepeatError(f"trial {other.number} is the same")


def values_of(trial: optuna.Trial, definition: SweepDefinition, summaries: Sequence[Mapping[str, Any]]) -> list[float]:
    """The objectives' means over the seeds, also stored with the trial. Raises TrialPruned if one has no value."""
    means = means_of(definition, summaries)
    for name, mean in means.items():
        trial.set_user_attr(name, mean)
    missing = [name for name in definition.objectives if name not in means]
    if missing:
        raise optuna.TrialPruned(f"{', '.join(missing)} missing: a run diverged, or could not be scored")
    return [means[name] for name in definition.objectives]


def means_of(definition: SweepDefinition, summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean over the runs of each objective and SHOWN quantity of which every run has a value."""
    means = {}
    for name in dict.fromkeys((*definition.objectives, *SHOWN)):
        values = [summary.get(name) if summary.get("outcome") == "ok" else None for summary in summaries]
        if (mean := complete_mean(values)) is not None:
            means[name] = mean
    return means


def enqueue(study: optuna.Study, tasks: Iterable[Task], definition: SweepDefinition) -> None:
    """Append tasks to the queue. A proposal keeps its earlier parameters or, after a repeat, gets an untried point."""
    trials = study.get_trials(deepcopy=False) if definition.adaptive else []
    repeats = Counter(task.key for trial in trials if trial.user_attrs.get("repeats") and (task := task_of(trial)))
    settled = {
        task.key: trial.params for trial in reversed(trials) if trial.state in SETTLED and (task := task_of(trial))
    }
    for task in tasks:
        # Of a finished task whose runs were deleted, the same runs are repeated.
        params = {name: plain(value) for name, value in (task.cell or settled.get(task.key, {})).items()}
        attributes: dict[str, Any] = {"task": asdict(task)}
        if task.cell is None and not params and repeats[task.key]:
            tried = {cell_digest(trial.user_attrs["cell"]) for trial in trials if "cell" in trial.user_attrs}
            point = untried(definition, tried, [task.proposal_index, repeats[task.key]])
            if point is None:
                attributes["infeasible"] = "every point of the space has already been proposed"
                excess = {"buildable": 1.0}
                refused = optuna.trial.create_trial(state=TrialState.PRUNED, user_attrs=attributes, constraints=excess)
                study.add_trial(refused)
                continue
            params = point
        study.enqueue_trial(params, user_attrs=attributes)


def take(
    study: optuna.Study, definition: SweepDefinition, lease_id: str, fits: Callable[[Task], bool] = lambda task: True
) -> optuna.Trial | None:
    """Take the first waiting trial that fits, under a lease; None if there is none.

    The caller must hold the queue's lock. Otherwise two processes could both write their lease, and the trial would be
    given back while it runs. The seed of a proposal's sampler does not depend on the worker."""
    storage = study._storage
    for waiting in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        task = task_of(waiting)
        if task is None or not fits(task):
            continue
        try:
            # Before it runs, so that a running trial always has a lease.
            storage.set_trial_user_attr(waiting._trial_id, "lease", lease_id)
            if not storage.set_trial_state_values(waiting._trial_id, TrialState.RUNNING):
                continue
        except UpdateFinishedTrialError:
            continue
        seed = int(digest([task.proposal_index])[:8], 16)
        sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=seed)  # not used: the cells are known
        if definition.sampler == "tpe":
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=random_proposals(definition))
        elif definition.sampler == "nsga2":
            sampler = optuna.samplers.NSGAIISampler(seed=seed, population_size=random_proposals(definition))
        # A new study object, since Optuna's caches the trials that it saw.
        trial_study = optuna.load_study(study_name=study.study_name, storage=storage, sampler=sampler)
        return optuna.Trial(trial_study, waiting._trial_id)
    return None


def give_back(study: optuna.Study, trial: optuna.Trial | FrozenTrial) -> None:
    """Return a trial to the queue unchanged, unless another process has finished it."""
    with contextlib.suppress(UpdateFinishedTrialError):
        study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)


def give_back_lost(study: optuna.Study, results: Path, own_lease_id: str, taken: Collection[int] = ()) -> None:
    """Return to the queue the trials of dead workers, and those under the caller's lease that are not `taken` by one of
    its workers any more."""
    now = last_heartbeat(lease_path(results, own_lease_id))  # by the file system's clock: this machine's may be wrong
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        lease_id = trial.user_attrs.get("lease")
        is_forgotten = lease_id == own_lease_id and trial.number not in taken
        if lease_id is None or is_forgotten or not is_held(lease_path(results, lease_id), now):
            give_back(study, trial)


def tell(trial: optuna.Trial, state: TrialState, values: list[float] | None = None) -> None:
    """Tell the study how a trial ended, unless another process has already done so."""
    try:
        with contextlib.suppress(UpdateFinishedTrialError):
            trial.study.tell(trial, values, state)
    except ValueError as error:
        if not str(error).startswith("Cannot tell a"):  # Optuna's message for a trial that is finished or waiting
            raise


def count(study: optuna.Study, state: TrialState) -> int:
    return len(study.get_trials(deepcopy=False, states=(state,)))


def refused(study: optuna.Study) -> Counter[str]:
    """Reason -> number of proposals that were not run: excluded, impossible to build, or breaking a constraint."""
    settled = study.get_trials(deepcopy=False, states=SETTLED)
    last = {task.key if (task := task_of(trial)) else str(trial.number): trial for trial in settled}  # may be retried
    return Counter(trial.user_attrs["infeasible"] for trial in last.values() if "infeasible" in trial.user_attrs)


def lease_path(results: Path, lease_id: str) -> Path:
    """The lease of a sweep process for its trials. Raises ValueError for an invalid id from a shared storage."""
    return results / "work" / f"sweep-{uuid.UUID(hex=lease_id).hex}.lock"


def missing(study: optuna.Study, plan: Plan, index: ResultsIndex) -> tuple[list[Task], list[Task]]:
    """The tasks of a sweep that are not done, and those of them that are neither running nor waiting. A task with a
    known cell is done if its run is complete or pruned; a proposal if its trial is finished and its runs are still
    complete, or one does not fit into memory."""
    active: set[str] = set()
    settled: set[str] = set()
    for trial in study.get_trials(deepcopy=False):
        task = task_of(trial)
        if task and trial.state in (TrialState.WAITING, TrialState.RUNNING):
            active.add(task.key)
        elif task and trial.state in SETTLED:
            begun = [value for name, value in trial.user_attrs.items() if name.startswith("run_id_seed_")]
            states = [index.state(run_id) for run_id in begun]
            # A shortage of memory may have been forgotten (--retry-failed); the folder says so.
            is_refused = "infeasible" in trial.user_attrs and (not begun or "infeasible" in states)
            if is_refused or "pruned" in trial.user_attrs or {*states} <= {"complete"}:
                settled.add(task.key)

    def is_done(task: Task) -> bool:
        run = plan.run_of(task)
        return task.key in settled if run is None else index.state(run.run_id) in ("complete", "pruned")

    undone = [task for task in plan.tasks(index.loss_of) if not is_done(task)]
    return undone, [task for task in undone if task.key not in active]


def rebuild(study: optuna.Study, plan: Plan, index: ResultsIndex) -> None:
    """Add a trial for each finished task that is not in the study; end those that wait, of an earlier definition."""
    planned = {task.key for task in plan.tasks(index.loss_of)}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        if (task := task_of(trial)) and task.key not in planned:
            study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
    if plan.definition.adaptive:
        _add_proposals(study, plan.definition, index.results)
        return
    known = {task.key for trial in study.get_trials(deepcopy=False) if (task := task_of(trial))}
    for planned in plan.runs(index.loss_of):
        if planned.task.key not in known and index.is_complete(planned.run_id):
            summary = run_record.read_run(run_record.run_folder(index.results, planned.run_id)).summary
            _add_ended(study, plan.definition, planned.task, [(planned.config, summary)])


def _add_proposals(study: optuna.Study, definition: SweepDefinition, results: Path) -> None:
    """Add an unused proposal for each cell whose runs are all finished, or one of them pruned."""
    trials = study.get_trials(deepcopy=False)
    known = {cell_digest(trial.user_attrs["cell"]) for trial in trials if "cell" in trial.user_attrs}
    used = {task.proposal_index for trial in trials if (task := task_of(trial))}
    unused = [index for index in range(definition.n_trials or 0) if index not in used]
    if not unused:
        return
    cells: dict[str, dict[int, ConfigAndSummary]] = {}
    for config, summary in _finished(results):
        cell = _cell_of(definition, config)
        if cell is not None and config.seed in definition.seeds and cell_digest(cell) not in known:
            cells.setdefault(config.cell_id, {})[config.seed] = (config, summary)
    finished = [
        list(runs.values())
        for runs in cells.values()
        if len(runs) == len(definition.seeds) or any(summary is None for _, summary in runs.values())
    ]
    for proposal_index, runs in zip(unused, finished, strict=False):
        task = Task(cell=None, seeds=definition.seeds, proposal_index=proposal_index)
        _add_ended(study, definition, task, runs)


def _cell_of(definition: SweepDefinition, config: RunConfig) -> dict[str, Any] | None:
    """The cell of a run if a sampler could have proposed it, else None."""
    try:
        cell = definition.cell({name: getattr(config, name) for name in definition.axes})
        is_proposal = definition.run_config(cell, config.seed).run_id == config.run_id
    except ValueError:  # a value that is not on its axis
        return None
    has_values = all(in_axis(axis, cell[name]) for name, axis in definition.axes.items() if name in cell)
    return cell if is_proposal and has_values and not definition.is_excluded(cell) else None


def _finished(results: Path) -> Iterator[ConfigAndSummary]:
    """The complete runs, then the pruned ones."""
    for marker in sorted((results / "runs").glob(f"*/{run_record.MARKER}")):
        try:
            run = run_record.read_run(marker.parent)
        except run_record.DamagedRun:
            continue  # repeated when its proposal comes up
        yield run.config, run.summary
    for path in sorted((results / "work").glob("*/pruned.json")):
        try:
            config = build(RunConfig, read_yaml(path.parent / "config.yaml"), str(path.parent))
        except ValueError:
            continue  # damaged: it is pruned again when its proposal comes up
        if Scratch(results, path.parent.name).pruned():
            yield config, None


def _add_ended(study: optuna.Study, definition: SweepDefinition, task: Task, runs: Sequence[ConfigAndSummary]) -> None:
    configs = [config for config, _ in runs]
    summaries = [summary for _, summary in runs if summary is not None]
    is_pruned = len(summaries) < len(runs)
    means = {} if is_pruned else means_of(definition, summaries)
    axes = distributions(definition)
    cell = task.cell or _cell_of(definition, configs[0]) or {}
    params = {name: plain(cell[name]) for name in axes if name in cell}
    run_ids = {f"run_id_seed_{config.seed}": config.run_id for config in configs}
    pruned = {"pruned": "see its scratch folder"} if is_pruned else {}
    is_scored = {*definition.objectives} <= {*means}
    study.add_trial(
        optuna.trial.create_trial(
            state=TrialState.COMPLETE if is_scored else TrialState.PRUNED,
            values=[means[name] for name in definition.objectives] if is_scored else None,
            params=params,
            distributions={name: axes[name] for name in params},
            user_attrs={"task": asdict(task), "cell": cell, **means, **run_ids, **pruned},
            constraints={"buildable": 0.0, **constraint_excess(definition, configs[0])},
        )
    )
