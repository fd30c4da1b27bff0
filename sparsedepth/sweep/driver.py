"""`sparsedepth sweep`: check and prepare the sweep, queue the missing runs, run them, and leave everything resumable.

    driver -> worker (one per parallel run) -> forkserver -> run.execute, a process for each run

The same command resumes: complete runs are recognised by their run_id, interrupted runs continue from their checkpoint,
failed runs are tried again up to a limit. Any number of processes on any number of machines may drive one sweep: each
queues missing runs, under a lease, and takes tasks from the queue."""

import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from sparsedepth.config.corpus import TEXT, kind_of
from sparsedepth.config.run import DataConfig, MeasureConfig, RunConfig
from sparsedepth.config.task import TaskConfig
from sparsedepth.data.ngram_losses import losses_ahead
from sparsedepth.plan.tasks import Plan, first_proposal
from sparsedepth.run.comparable import checked_source
from sparsedepth.run.lease import Stopped, hold, stopped_holder
from sparsedepth.run.process import Stop
from sparsedepth.store.cache import read_columns
from sparsedepth.store.made_with import package_versions, version_differences
from sparsedepth.sweep import forkserver, storage
from sparsedepth.sweep.machine import Machine
from sparsedepth.sweep.results_folder import ResultsIndex, delete_leftovers, delete_trunks, lease_path, prepare
from sparsedepth.sweep.status import RunState, forget_failures, scan
from sparsedepth.sweep.trial_queue import Queue
from sparsedepth.sweep.worker import Worker
from sparsedepth.words.plain_text import counted
from sparsedepth.words.runs import version_text
from sparsedepth.words.sweep import storage_text

MAX_FAILURES, MAX_DEATHS = 3, 5
"""Failed runs in a row, and mean deaths of a worker's forkserver, without a completed run, that stop the sweep."""

SHOW_SECONDS, SHOW_SHARE = 0.3, 0.05
"""Minimum interval between scans of all runs, and their largest share of the driver's time: they take cores."""
POLL_SECONDS = 1.0
"""Interval between checks of an empty queue, to which other workers may return runs."""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    states: list[RunState]
    unfinished: int
    refused: Counter[str]
    """reason -> number of proposals that were not run"""
    stop: Stop
    """whether a signal ended it, and the exit code"""


@dataclass
class Driver:
    """One invocation of `sweep` or `work` on a results folder."""

    plan: Plan
    results: Path
    machine: Machine
    storage_url: str | None = None
    """database of the study; None: a journal in the results folder"""
    stop: Stop = field(default_factory=lambda: Stop(is_announced=True))
    leaves_when_idle: bool = False
    """end when the queue is empty, even if other workers may return tasks to it"""
    on_progress: Callable[[list[RunState]], None] = lambda states: None
    """called a few times a second with the state of every run"""
    on_note: Callable[[str], None] = lambda text: None
    """called with what is known of the text before the first run"""

    def __post_init__(self) -> None:
        self.definition = self.plan.definition
        self.results_index = ResultsIndex(self.results, self.definition, self.machine.max_attempts)
        self._gives_up = False
        self._counted: set[str] = set()
        """runs of which a failure or the completion has been counted"""
        self._failed_in_a_row: list[RunState] = []
        self._named: set[str] = set()
        """leases of the stopped processes of which a warning was given"""
        self._connection_retry = storage.ConnectionRetry(self.stop)
        numbers = range(self.machine.workers)
        self._workers = [Worker(self.machine, self.results_index, self._is_ending, number) for number in numbers]

    def _is_ending(self) -> bool:
        return self.stop() or self._gives_up

    def run(self, *, retry_failed: bool = False) -> SweepResult:
        """Run the missing runs. Raises ValueError for user errors before anything runs."""
        prepare(self.results, self.definition, self.machine.max_attempts)
        if retry_failed:
            forget_failures(self.results, self.definition, self.machine.max_attempts)
        self._prepare_text()  # before signals are caught, so that Ctrl-C ends a long tokenisation at once
        result = self.run_queue()
        delete_leftovers(self.results)
        return result

    def join(self) -> SweepResult:
        """Run the queue in addition to the sweep's other processes. Raises ValueError if the storage has no study of
        the sweep; with `leaves_when_idle` (a cluster's job, which may be the first process) it is created instead."""
        with storage.with_error_messages(self.storage_url, self.results):
            if not self.leaves_when_idle and not storage.has_study(self.definition, self.storage_url, self.results):
                address = storage.database_url(self.storage_url) if self.storage_url else None
                name = storage_text(address, self.results / storage.JOURNAL)
                raise ValueError(
                    f"{name} has no study of the sweep in {self.results}; give the same --storage as `sparsedepth "
                    "sweep`, or start that first"
                )
        return self.run_queue()

    def run_queue(self) -> SweepResult:
        """Run the queue of a prepared folder. Raises ValueError if too many runs fail."""
        self._compare_packages()
        self.stop.catch()
        with storage.with_error_messages(self.storage_url, self.results):
            queue = self.open_queue()
            path = lease_path(self.results, queue.lease_id)
            with hold(path, self.stop):
                try:
                    with self._locked_queue():
                        queue.add_finished()
                    self._loop(queue)
                except Stopped:
                    pass
                finally:
                    for worker in self._workers:
                        worker.abandon()
                path.unlink(missing_ok=True)
            delete_trunks(self.results, [*self._runs().values()])
            return self._result(queue)

    def open_queue(self) -> Queue:
        study = storage.open_study(self.definition, self.storage_url, self.results)
        return Queue(study, self.plan, self.results_index, uuid.uuid4().hex)

    def _locked_queue(self) -> AbstractContextManager[object]:
        return hold(self.results / "work" / "queue.lock", self.stop)

    def _result(self, queue: Queue) -> SweepResult:
        """The result of this invocation, retrying while the study's database does not answer."""
        while True:
            try:
                refused = queue.refused()
                unfinished = queue.unfinished()
                states = scan(self.results_index, self._runs())
                return SweepResult(states=states, unfinished=unfinished, refused=refused, stop=self.stop)
            except storage.errors() as error:
                if self.stop():
                    raise
                self._connection_retry.wait(error)

    def _compare_packages(self) -> None:
        """Warn if installed packages differ from those of the complete runs; with `same_packages` raise ValueError."""
        rows = read_columns(self.results, ("packages",), damaged=[])
        difference = version_text(version_differences((row["packages"] for row in rows.values()), package_versions()))
        if difference and self.definition.same_packages:
            raise ValueError(f"{self.results}: {difference}; install the runs' versions, or remove same_packages")
        if difference:
            warnings.warn(f"{difference}; same_packages: true in the definition refuses that", stacklevel=2)

    def _prepare_text(self) -> None:
        """Tokenise each text of the sweep once, and check that it is long enough for every run."""
        runs = [*self._runs().values()] or [first_proposal(self.definition)]
        names = {name for section in (DataConfig, TaskConfig, MeasureConfig) for name in section.model_fields}
        names |= {"vocab_size", "seq_len", "batch_tokens"}
        first_of = {}
        for config in runs:
            first_of.setdefault(config.model_dump_json(include=names), config)
        for number, config in enumerate(first_of.values()):
            source = checked_source(config, self.results)
            if number == 0 and kind_of(config.corpus) is TEXT:
                loss = losses_ahead(source, config)["bigram_loss"]
                self.on_note(
                    f"a bigram table of the training text reaches {loss:.4g} nat/token; "
                    "a worse model is no evidence about depth"
                )

    def _runs(self) -> dict[str, RunConfig]:
        return self.plan.configs(self.results_index.loss_of)

    def _loop(self, queue: Queue) -> None:
        """Advance the workers, assign tasks and show progress, until nothing is left and every worker is idle."""
        runs = self._runs()
        self._count_failures(scan(self.results_index, runs))
        self._failed_in_a_row = []  # what failed earlier does not count
        polled_at = float("-inf")
        show_at = float("-inf")
        while True:
            ended = self._advance()
            idle = [worker for worker in self._workers if worker.is_idle]
            now = time.monotonic()
            if self._is_ending():
                if len(idle) == len(self._workers):
                    break
            elif idle and (ended or now > polled_at + POLL_SECONDS):
                if not self._assign_tasks(queue, idle):
                    break
                polled_at = now
                runs = self._runs()  # finished tuning runs determine the next runs
            if now > show_at:
                self._show(runs)
                show_at = now + max(SHOW_SECONDS, (time.monotonic() - now) / SHOW_SHARE)
            time.sleep(0.05)
        self._show(self._runs())
        self._check_failures()

    def _check_failures(self) -> None:
        """Raises ValueError if the sweep gave up, with the cause."""
        if len(failed := self._failed_in_a_row) >= MAX_FAILURES:
            raise ValueError(
                f"{len(failed)} runs failed in a row, the last with: {failed[-1].reason}. "
                f"See the logs in {self.results / 'work'}/*/log.txt, fix the cause, "
                "and run the same command again with --retry-failed"
            )
        if any(worker.no_storage for worker in self._workers):
            storage.check_disk_space(self.results, is_too_little=True)
        if self._gives_up:
            raise forkserver.deaths_error()

    def _count_failures(self, states: list[RunState]) -> bool:
        """Count the new failures in a row, with no completed run in between. Returns whether a run was completed."""
        new = [s for s in states if s.state in ("failed", "complete") and s.run_id not in self._counted]
        self._counted |= {state.run_id for state in new}
        for state in new:
            self._failed_in_a_row = [*self._failed_in_a_row, state] if state.state == "failed" else []
        return any(state.state == "complete" for state in new)

    def _show(self, runs: dict[str, RunConfig]) -> None:
        """Report progress, and decide whether to give up."""
        states = scan(self.results_index, runs)
        self.on_progress(states)
        if self._count_failures(states):
            for worker in self._workers:
                worker.server_deaths = 0
        deaths = sum(worker.server_deaths for worker in self._workers)
        self._gives_up |= (
            any(worker.no_storage for worker in self._workers)
            or len(self._failed_in_a_row) >= MAX_FAILURES
            or deaths >= MAX_DEATHS * len(self._workers)
        )

    def _advance(self) -> bool:
        """Advance every worker. Returns whether one has become idle."""
        busy = [worker for worker in self._workers if not worker.is_idle]
        for worker in busy:
            try:
                worker.advance()
            except storage.errors() as error:
                self._connection_retry.wait(error)
        return any(worker.is_idle for worker in busy)

    def _assign_tasks(self, queue: Queue, idle: list[Worker]) -> bool:
        """Assign tasks to the idle workers. Returns whether tasks are left to wait for: in the hands of other processes
        and not done."""
        taken = {number for worker in self._workers for number in worker.task_steps}
        try:
            for worker in idle:
                with self._locked_queue():
                    if not worker.take(queue, len(self._workers), taken):
                        break
                taken |= {*worker.task_steps}
            self._connection_retry.reset()
            if not all(worker.is_idle for worker in self._workers):
                return True
            self._name_stopped(queue)
            may_leave = self.leaves_when_idle and not self.plan.is_open(self.results_index.loss_of)
            return not may_leave and bool(queue.elsewhere)
        except Stopped:  # while another process held the queue; our own runs are waited for
            return True
        except storage.errors() as error:
            self._connection_retry.wait(error)
            return True

    def _name_stopped(self, queue: Queue) -> None:
        """Warn of each process that is stopped, for which this one would wait without a word."""
        for lease_id, n_tasks in queue.elsewhere.items():
            process = stopped_holder(lease_path(self.results, lease_id))
            if process and lease_id not in self._named:
                self._named.add(lease_id)
                warnings.warn(
                    f"process {process} of this sweep is stopped (Ctrl-Z, SIGSTOP) and has "
                    f"{counted(n_tasks, 'task')}: continue it with `kill -CONT {process}`, "
                    f"or end it with `kill -9 {process}`",
                    stacklevel=2,
                )
