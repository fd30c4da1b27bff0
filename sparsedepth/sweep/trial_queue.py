"""The queue of a sweep, derived whenever it is asked: left is what the plan wants and the run folders do not have.

    run folders      what has ended, and how: the record (`sweep.results_folder`)
    trials           what Optuna's sampler learns from, and whose hands a task is in: the trial names a lease
    leases           whether these hands live (`run.lease`)

Nothing is stored of a task before somebody takes it. Its trial is then RUNNING under the lease of that process until
it is told. A trial whose lease nobody holds, and one that waits, is taken over with its number and its proposal. A
sampler's seed depends only on the proposal, so a worker proposes the same points however often it is killed.

A study that was deleted, or lacks runs that were finished elsewhere, is filled from the folders (`add_finished`).
Proposals without any run (infeasible ones) leave no folder, and are proposed again."""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.role import can_stack
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Fields
from sparsedepth.config.space import cell_digest, in_axis
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.files import digest
from sparsedepth.plan.propose import distributions, plain, suggest, untried
from sparsedepth.plan.tasks import Plan, Task, constraint_excess, random_proposals
from sparsedepth.run.lease import is_held, last_heartbeat
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import run_record
from sparsedepth.sweep.results_folder import Ended, ResultsIndex, lease_path, run_ids
from sparsedepth.words.sweep import excess_text

SETTLED, OPEN = (TrialState.COMPLETE, TrialState.PRUNED), (TrialState.RUNNING, TrialState.WAITING)

MAX_ROUNDS = 5
"""How often one process begins a task anew that ends without a trace in the folders."""

SHOWN = ("val_loss", "usefulness", "train_flops", "params_total")
"""Quantities stored with a trial in addition to its objectives, for a dashboard."""

RUN_ID_OF = "run_id_seed_"
DONE = ("complete", "pruned")


class RepeatError(Exception):
    """A proposal that repeats another one, and is replaced."""


class Taken(NamedTuple):
    trial: optuna.Trial
    task: Task


@dataclass
class Queue:
    """The tasks of a sweep, as one of its processes sees them."""

    study: optuna.Study
    plan: Plan
    index: ResultsIndex
    lease_id: str
    """of this process"""
    elsewhere: Counter[str] = field(default_factory=Counter)
    """lease of each living process -> its tasks that were not done when this one last looked for some"""
    _begun: Counter[str] = field(default_factory=Counter)

    @property
    def definition(self) -> SweepDefinition:
        return self.plan.definition

    def tasks(self) -> list[tuple[Task, Ended | None]]:
        """The tasks that are known, in the order in which they should start, and how each has ended. A proposal is
        complete if it was refused, or a trial of it names its runs and all are complete or one pruned."""
        if not self.definition.adaptive:
            return [(run.task, self.index.state(run.run_id)) for run in self.plan.runs(self.index.loss_of)]
        trials = self.study.get_trials(deepcopy=False)
        done = {task.key for trial in trials if (task := task_of(trial)) and self._is_done(trial, task)}
        return [(task, "complete" if task.key in done else None) for task in self.plan.tasks()]

    def undone(self) -> list[Task]:
        """The tasks without a result that may still come, or be tried again by --retry-failed."""
        return [task for task, state in self.tasks() if state not in DONE]

    def _is_done(self, trial: FrozenTrial, task: Task) -> bool:
        begun = [value for name, value in trial.user_attrs.items() if name.startswith(RUN_ID_OF)]
        states = [self.index.state(run_id) for run_id in begun]
        if "infeasible" in trial.user_attrs:  # a shortage of memory may have been forgotten (--retry-failed)
            is_done = not begun or "infeasible" in states
        else:
            is_done = "pruned" in trial.user_attrs or (len(begun) == len(task.seeds) and {*states} <= {"complete"})
        return is_done and trial.state != TrialState.FAIL

    def unfinished(self) -> int:
        return len(self.undone()) + self.plan.is_open(self.index.loss_of)

    def take(self, n_workers: int, stack_size: Callable[[RunConfig], int], taken: Collection[int]) -> list[Taken]:
        """Take the first task that is left, and those that can be stacked with it, but no more than a worker's share;
        lost trials first. `taken`: numbers of the trials that workers of this process have. The caller must hold the
        queue's lock: else two processes could take one task."""
        left = self._left(taken)
        own = list[Taken]()
        stack = list[RunConfig]()
        share = -(-len(left) // n_workers)
        for task, lost in left:
            run = self.plan.run_of(task)
            if stack and not (run and can_stack(*stack, run.config)):
                continue
            if trial := self._begin(task, lost):
                own.append(Taken(trial, task))
                if run is None:  # a proposal's seeds are a stack; the sampler needs its result before the next proposal
                    break
                stack.append(run.config)
            if stack and len(stack) >= min(share, stack_size(stack[0])):
                break
        return own

    def _left(self, taken: Collection[int]) -> list[tuple[Task, FrozenTrial | None]]:
        """The tasks of trials in nobody's hands, and those without one; trials of an earlier definition are ended."""
        tasks = self.tasks()
        trials = self.study.get_trials(deepcopy=False, states=OPEN)
        planned = {task.key for task, _ in tasks}
        now = last_heartbeat(lease_path(self.index.results, self.lease_id))  # by the folder's clock
        held = dict[str, str]()
        lost = dict[str, tuple[Task, FrozenTrial | None]]()
        for trial, task in ((trial, task) for trial in trials if (task := task_of(trial))):
            if self._is_taken(trial, taken, now):
                held[task.key] = trial.user_attrs["lease"]
            elif task.key in planned:
                lost[task.key] = task, trial
            else:
                with contextlib.suppress(UpdateFinishedTrialError):
                    self.study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        self.elsewhere = Counter(held[task.key] for task, state in tasks if state not in DONE and task.key in held)
        new = (task for task, state in tasks if state is None and self._begun[task.key] < MAX_ROUNDS)
        return [*lost.values(), *((task, None) for task in new if task.key not in held and task.key not in lost)]

    def _is_taken(self, trial: FrozenTrial, taken: Collection[int], now: float | None) -> bool:
        """Whether a trial is in the hands of a living process. `now`: this machine's clock may be wrong."""
        lease = trial.user_attrs.get("lease")
        if trial.state != TrialState.RUNNING or lease is None:
            return False
        return trial.number in taken if lease == self.lease_id else is_held(lease_path(self.index.results, lease), now)

    def _begin(self, task: Task, lost: FrozenTrial | None) -> optuna.Trial | None:
        """Take over a lost trial, or make one; it always has a lease before it runs. None if another process has
        finished it, and for a proposal when no point of the space is left."""
        storage = self.study._storage
        if lost:
            trial_id = lost._trial_id
            try:
                storage.set_trial_user_attr(trial_id, "lease", self.lease_id)
                storage.set_trial_state_values(trial_id, TrialState.RUNNING)
            except UpdateFinishedTrialError:
                return None
        else:
            made = self._new_trial(task)
            trial_id = storage.create_new_trial(self.study._study_id, template_trial=made)
            self._begun[task.key] += 1
            if made.state != TrialState.RUNNING:
                return None
        seed = int(digest([task.proposal_index])[:8], 16)
        drawn = random_proposals(self.definition)
        sampler = optuna.samplers.RandomSampler(seed=seed)  # not used: the cells are known
        if self.definition.sampler == "tpe":
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=drawn)
        elif self.definition.sampler == "nsga2":
            sampler = optuna.samplers.NSGAIISampler(seed=seed, population_size=drawn)
        # A new study object, since Optuna's caches the trials that it saw.
        study = optuna.load_study(study_name=self.study.study_name, storage=storage, sampler=sampler)
        return optuna.Trial(study, trial_id)

    def _new_trial(self, task: Task) -> FrozenTrial:
        """A proposal keeps its earlier parameters if its runs were deleted; after a repeat it gets an untried point."""
        attributes = {"task": asdict(task), "lease": self.lease_id}
        params = dict(task.cell or {})
        if task.cell is None:
            trials = self.study.get_trials(deepcopy=False)
            own = [trial for trial in trials if (other := task_of(trial)) and other.key == task.key]
            params = next((trial.params for trial in own if trial.state in SETTLED), {})
            if not params and (repeats := sum("repeats" in trial.user_attrs for trial in own)):
                point = untried(self.definition, cells_of(trials), [task.proposal_index, repeats])
                if point is None:
                    attributes["infeasible"] = "every point of the space has already been proposed"
                    excess = {"buildable": 1.0}
                    return create_trial(state=TrialState.PRUNED, user_attrs=attributes, constraints=excess)
                params = point
        fixed = {name: plain(value) for name, value in params.items()}
        return create_trial(state=TrialState.RUNNING, user_attrs=attributes, system_attrs={"fixed_params": fixed})

    def refused(self) -> Counter[str]:
        """Reason -> number of proposals that were not run: excluded, impossible to build, or breaking a constraint."""
        settled = self.study.get_trials(deepcopy=False, states=SETTLED)
        last = {task.key if (task := task_of(trial)) else str(trial.number): trial for trial in settled}  # the retried
        return Counter(trial.user_attrs["infeasible"] for trial in last.values() if "infeasible" in trial.user_attrs)

    def add_finished(self) -> None:
        """Add a trial for each finished task that is not in the study."""
        trials = self.study.get_trials(deepcopy=False)
        if self.definition.adaptive:
            self._add_proposals(trials)
            return
        known = {task.key for trial in trials if (task := task_of(trial))}
        for run in self.plan.runs(self.index.loss_of):
            if run.task.key not in known and self.index.is_complete(run.run_id):
                summary = run_record.read_run(run_record.run_folder(self.index.results, run.run_id)).summary
                self._add_ended(run.task, [(run.config, summary)])

    def _add_proposals(self, trials: Sequence[FrozenTrial]) -> None:
        """Add an unused proposal for each cell whose runs are all finished, or one of them pruned."""
        definition = self.definition
        known = cells_of(trials)
        used = {task.proposal_index for trial in trials if (task := task_of(trial))}
        unused = [index for index in range(definition.n_trials or 0) if index not in used]
        cells = {}
        for config, summary in self._finished() if unused else ():
            cell = cell_of(definition, config)
            if cell is not None and config.seed in definition.seeds and cell_digest(cell) not in known:
                cells.setdefault(config.cell_id, {})[config.seed] = (config, summary)
        finished = [
            list(runs.values())
            for runs in cells.values()
            if len(runs) == len(definition.seeds) or any(summary is None for _, summary in runs.values())
        ]
        for proposal_index, runs in zip(unused, finished, strict=False):
            self._add_ended(Task(cell=None, seeds=definition.seeds, proposal_index=proposal_index), runs)

    def _finished(self) -> "Iterator[ConfigAndSummary]":
        """The complete runs, then the pruned ones; a damaged one is repeated when its proposal comes up."""
        results = self.index.results
        for run_id in sorted(run_ids(results, "runs")):
            with contextlib.suppress(run_record.DamagedRun):
                run = run_record.read_run(run_record.run_folder(results, run_id))
                yield run.config, run.summary
        for scratch in (Scratch(results, run_id) for run_id in sorted(run_ids(results, "work"))):
            with contextlib.suppress(ValueError):
                if scratch.recorded().pruned:
                    yield build(RunConfig, read_yaml(scratch.folder / "config.yaml"), str(scratch.folder)), None

    def _add_ended(self, task: Task, runs: "Sequence[ConfigAndSummary]") -> None:
        """Add a trial of a task whose runs have ended, told as its worker would have."""
        config = runs[0][0]
        summaries = [summary for _, summary in runs if summary is not None]
        is_pruned = len(summaries) < len(runs)
        means = {} if is_pruned else means_of(self.definition, summaries)
        axes = distributions(self.definition)
        cell = task.cell or cell_of(self.definition, config) or {}
        params = {name: plain(cell[name]) for name in axes if name in cell}
        named = {f"{RUN_ID_OF}{config.seed}": config.run_id for config, _ in runs}
        pruned = {"pruned": "see its scratch folder"} if is_pruned else {}
        is_scored = {*self.definition.objectives} <= {*means}
        self.study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if is_scored else TrialState.PRUNED,
                values=[means[name] for name in self.definition.objectives] if is_scored else None,
                params=params,
                distributions={name: axes[name] for name in params},
                user_attrs={"task": asdict(task), "cell": cell, **means, **named, **pruned},
                constraints={"buildable": 0.0, **constraint_excess(self.definition, config)},
            )
        )


ConfigAndSummary = tuple[RunConfig, Fields | None]
"""A run and its summary; None if it was pruned."""


def task_of(trial: optuna.Trial | FrozenTrial) -> Task | None:
    """The task of a trial; None for a trial of another program."""
    content = trial.user_attrs.get("task")
    return Task(**content) if content else None


def cells_of(trials: Iterable[optuna.Trial | FrozenTrial]) -> set[str]:
    """The digests of the cells of those that have one."""
    return {cell_digest(trial.user_attrs["cell"]) for trial in trials if "cell" in trial.user_attrs}


def configs_of(trial: optuna.Trial, task: Task, definition: SweepDefinition) -> list[RunConfig]:
    """The runs of a trial: the task's own cell, passed to Optuna as parameters, or the sampler's proposal.

    Raises TrialPruned if the cell is excluded, cannot be built or breaks a constraint (the sampler learns by how much),
    RepeatError if another proposal is the same."""
    cell = task.cell if task.cell is not None else _proposed_cell(trial, definition)
    for name in task.cell or ():
        suggest(trial, name, distributions(definition)[name])
    trial.set_user_attr("cell", cell)
    check_repeat(trial, task)
    infeasible = "it is excluded" if task.cell is None and definition.is_excluded(cell) else ""
    configs = []
    if not infeasible:
        try:
            configs = [definition.run_config(cell, seed) for seed in task.seeds]
        except ValueError as error:
            infeasible = str(error)
    constrain(trial, "buildable", 1.0 if infeasible else 0.0)
    if configs:
        excess = constraint_excess(definition, configs[0])
        for name, share in excess.items():
            constrain(trial, name, share)
        infeasible = excess_text(excess, definition.constraints)
    if infeasible:
        trial.set_user_attr("infeasible", infeasible)
        raise optuna.TrialPruned(infeasible)
    for config in configs:
        trial.set_user_attr(f"{RUN_ID_OF}{config.seed}", config.run_id)
    return configs


def _proposed_cell(trial: optuna.Trial, definition: SweepDefinition) -> Fields:
    """Axes under `only` are suggested last, and only if the other fields of the cell allow them."""
    axes = distributions(definition)
    point = {name: suggest(trial, name, axis) for name, axis in axes.items() if name not in definition.only}
    later = [*definition.only]
    while name := next((name for name in later if name in definition.cell({**point, name: None})), ""):
        later.remove(name)
        point[name] = suggest(trial, name, axes[name])
    return definition.cell(point)


def constrain(trial: optuna.Trial, name: str, excess: float) -> None:
    """Tell the sampler by how much a constraint is exceeded (above 0); only the first value counts."""
    if name not in trial.constraints:
        trial.set_constraint(name, excess)


def check_repeat(trial: optuna.Trial, task: Task) -> None:
    """Raises RepeatError if an earlier proposal has the same cell; also called after the runs, of which two may tie."""
    if task.cell is not None:
        return
    cell = cells_of([trial])
    for other in trial.study.get_trials(deepcopy=False)[: trial.number]:
        other_task = task_of(other)
        counts = other_task and other_task.key != task.key and other.state != TrialState.FAIL
        if counts and cells_of([other]) == cell:
            trial.set_user_attr("repeats", f"trial {other.number} is the same")
            raise RepeatError


def values_of(trial: optuna.Trial, definition: SweepDefinition, summaries: Sequence[Fields]) -> list[float]:
    """The objectives' means over the seeds, also stored with the trial. Raises TrialPruned if one has no value."""
    means = means_of(definition, summaries)
    for name, mean in means.items():
        trial.set_user_attr(name, mean)
    if missing := [name for name in definition.objectives if name not in means]:
        raise optuna.TrialPruned(f"{', '.join(missing)} missing: a run diverged, or could not be scored")
    return [means[name] for name in definition.objectives]


def means_of(definition: SweepDefinition, summaries: Sequence[Fields]) -> dict[str, float]:
    """The mean over the runs of each objective and SHOWN quantity of which every run has a value."""
    means = {}
    for name in dict.fromkeys((*definition.objectives, *SHOWN)):
        values = [summary.get(name) for summary in summaries if summary.get("outcome") == "ok"]
        known = [value for value in values if value is not None]
        if len(known) == len(summaries):
            means[name] = sum(known) / len(known)
    return means


def tell(trial: optuna.Trial, state: TrialState, values: list[float] | None = None) -> None:
    """Tell the study how a trial ended, unless another process has already done so."""
    try:
        with contextlib.suppress(UpdateFinishedTrialError):
            trial.study.tell(trial, values, state)
    except ValueError as error:
        if not str(error).startswith("Cannot tell a"):  # Optuna's message for a trial that is finished or waiting
            raise


def give_back(trial: optuna.Trial) -> None:
    """Leave a trial to whoever takes it next, unchanged, unless another process has finished it."""
    with contextlib.suppress(UpdateFinishedTrialError):
        trial.study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)


def cell_of(definition: SweepDefinition, config: RunConfig) -> Fields | None:
    """The cell of a run if a sampler could have proposed it, else None."""
    try:
        cell = definition.cell({name: getattr(config, name) for name in definition.axes})
        is_proposal = definition.run_config(cell, config.seed).run_id == config.run_id
    except ValueError:  # a value that is not on its axis
        return None
    has_values = all(in_axis(axis, cell[name]) for name, axis in definition.axes.items() if name in cell)
    return cell if is_proposal and has_values and not definition.is_excluded(cell) else None
