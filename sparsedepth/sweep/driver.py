"""`sparsedepth sweep`: check, prepare, queue, run what waits, watch, and leave everything resumable.

    driver -> worker (one for each run at a time) -> forkserver -> run.execute, a process for each run

The same command again continues: complete runs are recognised by their run_id, interrupted ones resume from their
checkpoint, failed ones are tried again up to a limit and then kept with their reason. Any number of processes may drive
one sweep, on any number of machines: each queues what is missing, under a lease, and takes what waits.
"""

import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from sparsedepth.config.images import is_text
from sparsedepth.config.run import DataConfig, MeasureConfig, RunConfig
from sparsedepth.config.sweep import SweepDefinition, read_definition
from sparsedepth.config.task import TaskConfig
from sparsedepth.data.source import open_source
from sparsedepth.files import parse_json
from sparsedepth.plan.planned_vs_actual import write_plan
from sparsedepth.plan.price import Price
from sparsedepth.plan.results_index import ResultsIndex
from sparsedepth.plan.tasks import Plan, Task, check_objective, first_proposal
from sparsedepth.run.lease import Stopped, hold, last_beat
from sparsedepth.run.manifest import package_versions
from sparsedepth.run.scratch import Scratch
from sparsedepth.run.signals import Stop
from sparsedepth.run.train_and_measure import check_source
from sparsedepth.store.cache import read_columns
from sparsedepth.store.packages import version_differences
from sparsedepth.sweep import forkserver, storage, trial_queue
from sparsedepth.sweep.failures import Failures
from sparsedepth.sweep.machine import Machine
from sparsedepth.sweep.rebuild import rebuild
from sparsedepth.sweep.results_folder import claim, drop_leftovers
from sparsedepth.sweep.status import RunState, scan
from sparsedepth.sweep.worker import Worker

MAX_DEATHS = 5
"""How often the forkserver may die under each worker, on average, with no run completed in between."""

MAX_ROUNDS = 5
"""How often a task is queued before it is left alone, since running it changes nothing."""

SHOW_SECONDS, SHOW_SHARE = 0.3, 0.05
"""Between two looks at the states of all runs, and the share of the driver's time that looking takes at most: of many
runs it takes a while, on cores that the runs need."""
LOOK_SECONDS = 1.0
"""Between two looks at an empty queue, while runs of others may still be given back to it."""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """How one invocation ended."""

    states: list[RunState]
    """of every run"""
    unfinished: int
    """tasks that are not done"""
    refused: Counter[str]
    """why proposals were not run, and how many"""
    stop: Stop
    """whether a signal ended it, and with which exit code"""


@dataclass
class Driver:
    """Drives one invocation of `sweep` on a results folder, or of `work` beside it."""

    definition: SweepDefinition
    results: Path
    machine: Machine
    on_progress: Callable[[list[RunState]], None]
    """called a few times a second with the state of every run"""
    storage_url: str | None = None
    """of the database that holds the study; a journal in the results folder where it is not given"""
    stop: Stop = field(default_factory=lambda: Stop(is_announced=True))
    leaves_when_idle: bool = False
    """once nothing waits it ends, though what others have in hand may come back to the queue"""
    price: Price | None = None
    """what was said that it costs; kept beside the results, to be compared"""
    plan: Plan = field(init=False)
    results_index: ResultsIndex = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a cell that cannot be built or matched, or an objective that is none."""
        check_objective(self.definition)
        self.plan = Plan(self.definition)
        self.results_index = ResultsIndex(self.results, self.definition, self._is_without_result)
        self._lease_id = uuid.uuid4().hex
        self._rounds: Counter[str] = Counter()
        self._gives_up = False
        self._storage_wait = storage.StorageWait()
        self._workers = [
            Worker(
                definition=self.definition,
                results=self.results,
                machine=self.machine,
                results_index=self.results_index,
                stop=lambda: self.stop() or self._gives_up,
                number=number,
            )
            for number in range(self.machine.workers)
        ]

    def run(self, *, retry_failed: bool = False) -> SweepResult:
        """Run what is missing.

        Raises ValueError for what the user must mend (a folder of another sweep, a cell that cannot be built, too
        little text), before anything has run.
        """
        claim(self.results, self.definition)
        drop_leftovers(self.results)
        if self.price:
            write_plan(self.results, self.price, [planned.config for planned in self.plan.runs()])
        self._prepare_text()  # before the signals are caught: Ctrl-C ends a long tokenisation at once
        if retry_failed:
            for state in scan(self.results, self.definition, self._runs()):
                Scratch(self.results, state.run_id).clear_failures()
        result = self.run_waiting()
        drop_leftovers(self.results)
        return result

    def run_waiting(self) -> SweepResult:
        """Run what waits, in a folder that is prepared. Raises ValueError for what made the sweep give up."""
        self._compare_packages()
        self.stop.catch()
        forkserver.prepare_server(self.machine.runtime.threads or 1)
        with storage.explained(self.storage_url, self.results):
            study = trial_queue.open_study(
                self.definition, storage.open_storage(self.storage_url, self.results), self.results
            )
            path = trial_queue.lease_path(self.results, self._lease_id)
            with hold(path, self.stop):
                try:
                    self.fill_queue(study)
                    self._loop(study)
                except Stopped:
                    pass
                finally:
                    for worker in self._workers:
                        worker.abandon()
                path.unlink(missing_ok=True)
            return self._result(study)

    def _result(self, study: optuna.Study) -> SweepResult:
        """What is there and what is not, and why; once the study's database answers."""
        while True:
            try:
                refused = trial_queue.refused(study)
                unfinished = len(self._missing(study).undone) + self.plan.is_open(self.results_index.loss_of)
                states = scan(self.results, self.definition, self._runs())
                return SweepResult(states=states, unfinished=unfinished, refused=refused, stop=self.stop)
            except storage.ERRORS as error:
                if self.stop():
                    raise
                self._storage_wait.wait(error, self.stop)

    def _compare_packages(self) -> None:
        """Warn where this machine's packages are not the runs'. Raises ValueError with `same_packages`."""
        rows = read_columns(self.results, ("packages",), damaged=[])
        difference = version_differences((row["packages"] for row in rows.values()), package_versions())
        if difference and self.definition.same_packages:
            raise ValueError(f"{self.results}: {difference}; install those of the runs, or leave out same_packages")
        if difference:
            warnings.warn(f"{difference}; same_packages: true in the definition refuses that", stacklevel=2)

    def fill_queue(self, study: optuna.Study) -> None:
        """Make the study know what is finished, and queue what is missing: first what a dead process had in hand."""
        with hold(self._queue_lock, self.stop):
            rebuild(study, self.plan, self.results, self.results_index)
        self._refill(study)

    @property
    def _queue_lock(self) -> Path:
        return self.results / "work" / "queue.lock"

    def _prepare_text(self) -> None:
        """Tokenise each text of the sweep once, and see that every run finds enough of it."""
        runs = self._runs()
        if not runs:
            runs = [self.definition.run_config(first_proposal(self.definition), self.definition.seeds[0])]
        hashes: dict[tuple, str] = {}
        for config in runs:
            sections = (DataConfig, TaskConfig, MeasureConfig)
            fields = (name for section in sections for name in section.model_fields)
            fields = (*fields, "vocab_size", "seq_len", "batch_tokens")
            shape = tuple(getattr(config, name) for name in fields)
            if shape not in hashes:
                source = open_source(config, self.results / "data")
                check_source(source, config)
                hashes[shape] = source.data_hash
            self._refuse_another_text(config, hashes[shape])

    def _refuse_another_text(self, config: RunConfig, data_hash: str) -> None:
        """Raises ValueError where a complete run read another text, whose tokens were deleted since."""
        try:
            manifest = parse_json((self.results / "runs" / config.run_id / "manifest.json").read_bytes())
        except (OSError, ValueError):
            return  # not complete, or damaged, and then made again
        if is_text(config.corpus) and manifest.get("data_hash", data_hash) != data_hash:
            raise ValueError(
                f"corpus={config.corpus!r} is not the text that run {config.run_id} of {self.results} has read: runs "
                f"on the two texts cannot be compared; restore the text, or choose another --out"
            )

    def _runs(self) -> list[RunConfig]:
        """The runs that are known by now."""
        return [planned.config for planned in self.plan.runs(self.results_index.loss_of)]

    def _loop(self, study: optuna.Study) -> None:
        """Until nothing waits and every worker is idle: advance the workers, hand out tasks, show the state."""
        failures = Failures(self._failed_permanently)
        runs = self._runs()
        failures.see(scan(self.results, self.definition, runs), before=True)
        looked, show_at = float("-inf"), float("-inf")
        while True:
            ended = self._advance()
            idle = [worker for worker in self._workers if worker.is_idle]
            now = time.monotonic()
            if self.stop() or self._gives_up:
                if len(idle) == len(self._workers):
                    break
            elif idle and (ended or now > looked + LOOK_SECONDS):
                if not self._hand_out(study, idle) and len(idle) == len(self._workers):
                    break
                looked = now
                if self.definition.tune:  # which runs are results follows from what tuning has found by now
                    runs = self._runs()
            if now > show_at:
                self._show(failures, runs)
                show_at = now + max(SHOW_SECONDS, (time.monotonic() - now) / SHOW_SHARE)
            time.sleep(0.05)
        self._show(failures, runs)
        self._explain(failures)

    def _show(self, failures: Failures, runs: list[RunConfig]) -> None:
        """Pass the state on, and see whether there is any sense in going on. Raises ValueError for a full disk."""
        states = scan(self.results, self.definition, runs)
        self.on_progress(states)
        n_failed = len(failures.in_a_row)
        if failures.see(states, before=False):
            for worker in self._workers:
                worker.server_deaths = 0
        if len(failures.in_a_row) > n_failed:  # a full disk fails run after run: it is named at the first
            storage.check_room(self.results)
        deaths = sum(worker.server_deaths for worker in self._workers)
        self._gives_up |= failures.too_many or deaths >= MAX_DEATHS * len(self._workers)

    def _advance(self) -> bool:
        """Advance every worker. Returns whether one has become idle."""
        ended = False
        for worker in self._workers:
            if not worker.is_idle:
                try:
                    worker.advance()
                except storage.ERRORS as error:
                    self._storage_wait.wait(error, self.stop)
                ended |= worker.is_idle
        return ended

    def _hand_out(self, study: optuna.Study, idle: list[Worker]) -> bool:
        """Give the idle workers tasks, as far as there are any. Returns whether something is left to wait for."""
        try:
            for worker in idle:
                if self._take(worker, study):
                    continue
                self._refill(study)
                if not self._take(worker, study):
                    break
            self._storage_wait.end()
            if trial_queue.count(study, TrialState.WAITING) or not all(worker.is_idle for worker in idle):
                return True
            may_leave = self.leaves_when_idle and not self.plan.is_open(self.results_index.loss_of)
            return not may_leave and bool(trial_queue.count(study, TrialState.RUNNING))
        except Stopped:  # while another process had the queue: what runs here is waited for
            return True
        except storage.ERRORS as error:
            self._storage_wait.wait(error, self.stop)
            return True

    def _take(self, worker: Worker, study: optuna.Study) -> bool:
        """Give a worker what is next: of few tasks no more than leaves some for the others."""
        share = -(-trial_queue.count(study, TrialState.WAITING) // len(self._workers))
        with hold(self._queue_lock, self.stop):
            return worker.take(study, self._lease_id, self.plan.config_of, share)

    def _refill(self, study: optuna.Study) -> None:
        """Queue what is neither done nor in hand, except what failed too often."""
        held = {number for worker in self._workers for number in worker.trials}

        def is_forgotten(trial: FrozenTrial) -> bool:
            return trial.user_attrs["lease"] == self._lease_id and trial.number not in held

        with hold(self._queue_lock, self.stop):
            beat = last_beat(trial_queue.lease_path(self.results, self._lease_id))  # this machine's clock may be off
            trial_queue.give_back_lost(study, self.results, is_forgotten, beat)
            tasks = [task for task in self._missing(study).unqueued if not self._is_given_up(task)]
            self._rounds.update(task.key for task in tasks)
            trial_queue.enqueue(study, tasks, self.definition)

    def _missing(self, study: optuna.Study) -> trial_queue.Missing:
        def is_done(run_id: str) -> bool:
            return self._is_pruned(run_id) or self.results_index.is_complete(run_id)

        return trial_queue.missing(
            study,
            self.plan.tasks(self.results_index.loss_of),
            self.results_index.is_complete,
            lambda task: all(is_done(run_id) for run_id in self.plan.run_ids(task)),
        )

    def _is_given_up(self, task: Task) -> bool:
        if self._rounds[task.key] >= MAX_ROUNDS:
            return True
        return any(self._failed_permanently(run_id) for run_id in self.plan.run_ids(task))

    def _failed_permanently(self, run_id: str) -> bool:
        scratch = Scratch(self.results, run_id)
        return len(scratch.failures()) >= self.machine.max_attempts or scratch.infeasible() is not None

    def _is_pruned(self, run_id: str) -> bool:
        return self.definition.prune is not None and Scratch(self.results, run_id).pruned() is not None

    def _is_without_result(self, run_id: str) -> bool:
        """Whether tuning goes on without the run."""
        return self._failed_permanently(run_id) or self._is_pruned(run_id)

    def _explain(self, failures: Failures) -> None:
        """Raise ValueError for what made the sweep give up."""
        failures.explain(self.results)
        if self._gives_up:
            raise ValueError(
                "the process that starts the runs died again and again, with no run completed in between (is there "
                "enough memory?). Finished runs are kept: mend the cause and give the same command again"
            )


def work(
    results: Path,
    machine: Machine,
    on_progress: Callable[[list[RunState]], None],
    storage_url: str | None = None,
    *,
    leaves_when_idle: bool = False,
) -> SweepResult:
    """Run what waits beside the sweep's other processes, on this machine or another, until nothing is left.

    Raises ValueError for a folder that no sweep fills, and where its study is not in this storage; but one that
    `leaves_when_idle`, the body of a cluster's job, may be the first to come, and begins the study.
    """
    definition = read_definition(results)
    if definition is None:
        raise ValueError(f"{results} is no folder of a sweep; start `sparsedepth sweep FILE --out {results}` first")
    with storage.explained(storage_url, results):
        if not leaves_when_idle and not trial_queue.has_study(definition, storage_url, results):
            raise ValueError(
                f"{storage.shown(storage_url, results)} has no study of the sweep in {results}; "
                f"give the --storage of `sparsedepth sweep`, or start that first"
            )
    driver = Driver(definition, results, machine, on_progress, storage_url, leaves_when_idle=leaves_when_idle)
    return driver.run_waiting()
