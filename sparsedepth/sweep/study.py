"""The Optuna study of a sweep: sampler and queue, never the record.

Every item of work waits in the study as an enqueued trial, so all workers share one queue and a dead worker's item is
simply enqueued again. What is finished is read from the run folders: a deleted study is rebuilt from them (`rebuild`).
"""

import logging
import threading
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy.event
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.files import digest
from sparsedepth.plan.propose import axis_distributions, known_distributions, plain, suggest
from sparsedepth.plan.tasks import Task, beyond, check_objective, excesses
from sparsedepth.run.lease import is_owned

HEARTBEAT_SECONDS = 15
GRACE_SECONDS = 60

SETTLED = (TrialState.COMPLETE, TrialState.PRUNED)

POPULATION = (8, 50)
"""Smallest and largest population of NSGA-II: a sixth of the trials, so that there are six generations."""

SHOWN = ("val_loss", "usefulness", "train_flops", "params_total")
"""What a trial carries besides its objectives, for a dashboard."""

OPEN = "open"
"""The study's attribute that tells workers with nothing to do that there will be more."""


def storage_url(results: Path) -> str:
    """SQLite in the results folder."""
    return f"sqlite:///{(results / 'study.db').resolve()}"


def make_sampler(definition: SweepDefinition, study: optuna.Study, worker: int) -> optuna.samplers.BaseSampler:
    """The sampler of the next proposal.

    Its seed is a function of the worker and of how many trials are settled: workers differ, and a single worker that is
    killed and started again proposes what it would have proposed.
    """
    settled = len(study.get_trials(deepcopy=False, states=SETTLED))
    seed = int(digest([worker, settled])[:8], 16)
    if definition.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    if definition.sampler == "nsga2":
        smallest, largest = POPULATION
        size = min(max((definition.n_trials or 0) // 6, smallest), largest)
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=size)
    return optuna.samplers.RandomSampler(seed=seed)  # has nothing to choose: the cells are known


def open_study(definition: SweepDefinition, url: str) -> optuna.Study:
    """The study of this definition, created where it is missing.

    Its name ends in a hash of the axes: Optuna cannot change a parameter's choices, so a definition that was extended
    gets a study of its own, filled from the run folders.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    shape = {
        "axes": {name: str(axis) for name, axis in distributions(definition).items()},
        "rules": definition.model_dump(mode="json", include={"base", "seeds", "objectives", "sampler", "constraints"}),
    }
    study = optuna.create_study(
        study_name=f"{definition.name}-{digest(shape)}",
        storage=open_storage(url),
        directions=check_objective(definition),
        load_if_exists=True,
    )
    study.set_metric_names(definition.objectives)
    return study


def open_storage(url: str) -> optuna.storages.BaseStorage:
    """The database, with heartbeats by which the trial of a dead worker is put into the queue again."""
    on_file = url.startswith("sqlite")
    return (_SQLiteStorage if on_file else optuna.storages.RDBStorage)(
        url,
        engine_kwargs={"connect_args": {"timeout": 60}} if on_file else None,
        heartbeat_interval=HEARTBEAT_SECONDS,
        grace_period=GRACE_SECONDS,
        heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=None),
    )


class _SQLiteStorage(optuna.storages.RDBStorage):
    """Takes SQLite's write lock before it reads the state that it is about to change.

    Python's driver begins a transaction at its first write: two workers could see one trial waiting, and both take it.
    """

    def __init__(self, url: str, **options: Any):
        self._changing = threading.local()
        super().__init__(url, **options)

        @sqlalchemy.event.listens_for(self.engine, "begin")
        def begin(connection: sqlalchemy.Connection) -> None:
            if getattr(self._changing, "state", False):
                connection.exec_driver_sql("BEGIN IMMEDIATE")

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        self._changing.state = True
        try:
            return super().set_trial_state_values(trial_id, state, values)
        finally:
            self._changing.state = False


def distributions(definition: SweepDefinition) -> dict[str, BaseDistribution]:
    """What each field may be, in Optuna's terms."""
    return axis_distributions(definition) if definition.adaptive else known_distributions(definition)


def item_of(trial: optuna.Trial | FrozenTrial) -> Task | None:
    """The item that a trial carries; None for one that Optuna made up because the queue had run empty."""
    found = trial.user_attrs.get("item")
    return Task(**found) if found else None


def attributes(item: Task) -> dict[str, Any]:
    """How a trial carries its item."""
    return {"item": {"cell": item.cell, "seeds": item.seeds, "proposal_index": item.proposal_index}}


# One trial


def configs_of(trial: optuna.Trial, item: Task, definition: SweepDefinition) -> list[RunConfig]:
    """The runs of a trial: the item's own cell, told to Optuna as parameters, or the sampler's proposal.

    Raises TrialPruned, and tells the sampler by how much, where the cell is excluded, cannot be built or breaks a
    constraint.
    """
    cell = _cell_of(trial, item, definition)
    trial.set_user_attr("cell", cell)
    infeasible = "it is excluded" if item.cell is None and definition.is_excluded(cell) else ""
    configs: list[RunConfig] = []
    if not infeasible:
        try:
            configs = [definition.run_config(cell, seed) for seed in item.seeds]
        except ValueError as error:
            infeasible = str(error)
    trial.set_constraint("buildable", 1.0 if infeasible else 0.0)
    if configs:
        for name, excess in excesses(definition, configs[0]).items():
            trial.set_constraint(name, excess)
        infeasible = beyond(definition, configs[0])
    if infeasible:
        trial.set_user_attr("infeasible", infeasible)
        raise optuna.TrialPruned(infeasible)
    return configs


def _cell_of(trial: optuna.Trial, item: Task, definition: SweepDefinition) -> dict[str, Any]:
    axes = distributions(definition)
    if item.cell is not None:
        for name in item.cell:
            suggest(trial, name, axes[name])
        return item.cell
    # An axis without a meaning in the cell is not asked for: `only` drops it once the fields it depends on are known.
    point = {name: suggest(trial, name, axis) for name, axis in axes.items() if name not in definition.only}
    for name in definition.only:
        if name in definition.cell({**point, name: None}):
            point[name] = suggest(trial, name, axes[name])
    return definition.cell(point)


def values_of(trial: optuna.Trial, definition: SweepDefinition, summaries: Sequence[Mapping[str, Any]]) -> list[float]:
    """The objectives' means over the seeds. Raises TrialPruned where a run has no value: it diverged, or could not be
    scored. What the runs came to is left in the trial's attributes."""
    means = means_of(definition, summaries)
    for name, mean in means.items():
        if mean is not None:
            trial.set_user_attr(name, mean)
    missing = [name for name in definition.objectives if means[name] is None]
    if missing:
        raise optuna.TrialPruned(f"{', '.join(missing)} missing: a run diverged, or could not be scored")
    return [mean for name in definition.objectives if (mean := means[name]) is not None]


def means_of(definition: SweepDefinition, summaries: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The mean over the runs of each objective, and of what a dashboard shows; None where a run has none."""
    means: dict[str, float | None] = {}
    for name in dict.fromkeys((*definition.objectives, *SHOWN)):
        values = [summary.get(name) if summary.get("outcome") == "ok" else None for summary in summaries]
        kept = [value for value in values if value is not None]
        means[name] = sum(kept) / len(kept) if len(kept) == len(values) else None
    return means


# The queue


def enqueue(study: optuna.Study, items: Iterable[Task]) -> None:
    """Append items to the queue; a proposal that was lost with its worker is asked for again as it was."""
    items = list(items)
    lost = _lost_proposals(study, items)
    for item in items:
        params = {name: plain(value) for name, value in (item.cell or lost.get(item.key, {})).items()}
        study.enqueue_trial(params, user_attrs=attributes(item))


def waiting(study: optuna.Study) -> int:
    """How many items wait for a worker."""
    return len(study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))


def is_open(study: optuna.Study) -> bool:
    """Whether the driver will add items when those in hand are finished."""
    return bool(study.user_attrs.get(OPEN))


def set_open(study: optuna.Study, more: bool) -> None:
    if is_open(study) != more:
        study.set_user_attr(OPEN, more)


def refused(study: optuna.Study) -> Counter[str]:
    """Why proposals were never run, and how many: they were excluded, could not be built, or broke a constraint."""
    settled = study.get_trials(deepcopy=False, states=SETTLED)
    return Counter(trial.user_attrs["infeasible"] for trial in settled if "infeasible" in trial.user_attrs)


def release_lost(study: optuna.Study, results: Path) -> int:
    """Give up the trials of workers that are dead, so that their items can be enqueued again. Returns how many."""
    lost = 0
    anyone_lives = any(is_owned(path) for path in (results / "work").glob("worker-*.lock"))
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        lease = trial.user_attrs.get("lease")  # missing for an instant after a worker took the trial
        if not (anyone_lives if lease is None else is_owned(lease_path(results, lease))):
            study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            lost += 1
    return lost


def lease_path(results: Path, lease: str) -> Path:
    """The lock that a worker holds for its life."""
    assert uuid.UUID(hex=lease).hex == lease
    return results / "work" / f"worker-{lease}.lock"


def missing(study: optuna.Study, items: Iterable[Task], is_done: Callable[[Task], bool]) -> list[Task]:
    """The items that are neither done, nor running, nor waiting.

    Done means: every run has its complete folder (`is_done`, for a known cell), or the trial is settled (a proposal).
    """
    active: set[str] = set()
    settled: set[str] = set()
    for trial in study.get_trials(deepcopy=False):
        item = item_of(trial)
        if item and trial.state in (TrialState.WAITING, TrialState.RUNNING):
            active.add(item.key)
        elif item and trial.state in SETTLED:
            settled.add(item.key)

    def done(item: Task) -> bool:
        return item.key in settled if item.cell is None else is_done(item)

    return [item for item in items if item.key not in active and not done(item)]


def _lost_proposals(study: optuna.Study, items: Iterable[Task]) -> dict[str, dict[str, Any]]:
    """The parameters that unfinished proposals had been given, by item key."""
    wanted = {item.key for item in items}
    found: dict[str, dict[str, Any]] = {}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.FAIL,)):
        item = item_of(trial)
        if item and item.key in wanted and trial.params and not trial.user_attrs.get("failed"):
            found[item.key] = dict(trial.params)
    return found
