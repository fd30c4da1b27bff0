"""`sparsedepth sweep`: check, prepare, queue, start workers, watch them, and leave everything resumable.

The same command again continues: complete runs are recognised by their run_id, interrupted ones resume from their
checkpoint, failed ones are tried again up to a limit and then kept with their reason.
"""

import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import optuna
import yaml

from sparsedepth import files
from sparsedepth.config.run import DataConfig, MeasureConfig, RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.config.task import TaskConfig
from sparsedepth.data.source import open_source
from sparsedepth.plan.definition_file import DEFINITION, planned_runs, read_definition
from sparsedepth.plan.planned_vs_actual import write_plan
from sparsedepth.plan.price import Price
from sparsedepth.plan.results_index import ResultsIndex
from sparsedepth.plan.tasks import Plan, Task, check_objective, first_proposal
from sparsedepth.run.lease import is_owned
from sparsedepth.run.process import Stop, stop_on_signals
from sparsedepth.run.scratch import Scratch
from sparsedepth.run.train_and_measure import check_source
from sparsedepth.store import folder as record
from sparsedepth.store.pack import refuse_pack
from sparsedepth.sweep import study as queue
from sparsedepth.sweep.pool import Machine, Pool
from sparsedepth.sweep.rebuild import rebuild
from sparsedepth.sweep.status import ENDED, RunState, scan
from sparsedepth.sweep.storage import check_room, connect, explained

MAX_FAILURES = 3
"""Runs that may fail one after the other, with none completed between, before the sweep stops."""


@dataclass
class Driver:
    """One invocation of `sweep` on a results folder."""

    definition: SweepDefinition
    results: Path
    machine: Machine
    watch: Callable[[list[RunState]], None]
    """called a few times a second with the state of every run"""
    storage: str | None = None
    """URL of the study; SQLite in the results folder where it is not given"""
    stop: Stop = field(default_factory=Stop)
    unfinished: int = 0
    """items that are not done, once `run` has returned"""
    refused: Counter[str] = field(default_factory=Counter)
    """why proposals were not run, once `run` has returned"""
    price: Price | None = None
    """what was said that it costs; kept beside the results, to be compared"""
    plan: Plan = field(init=False)
    finished: ResultsIndex = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a cell that cannot be built or matched, or an objective that is none."""
        check_objective(self.definition)
        self.plan = Plan(self.definition)
        self.finished = ResultsIndex(self.results, self.definition, self._failed_for_good)

    def run(self, *, retry_failed: bool = False) -> list[RunState]:
        """Run what is missing. Returns the state of every run.

        Raises ValueError for what the user must mend (a folder of another sweep, a cell that cannot be built, too
        little text), before anything has run.
        """
        claim(self.results, self.definition)
        if self.price:
            write_plan(self.results, self.price, [planned.config for planned in self.plan.runs()])
        self._prepare_text()  # before the signals are caught: Ctrl-C ends a long tokenisation at once
        self.stop.catch()
        if retry_failed:
            for state in scan(self.results, self.definition):
                Scratch(self.results, state.run_id).forget_failures()
        url = self.storage or queue.storage_url(self.results)
        with explained(url, self.results):
            study = connect(self.definition, url)
            rebuild(study, self.plan, self.results, self.finished)
            try:
                with Pool(self.results, url, self.machine) as pool:
                    self._watch(study, pool)
            finally:
                queue.set_open(study, False)  # or the workers of other machines would wait for more
            self.refused = queue.refused(study)
            self.unfinished = len(self._missing(study)) + self.plan.is_open(self.finished)
        drop_leftovers(self.results)
        return scan(self.results, self.definition)

    def _prepare_text(self) -> None:
        """Tokenise each text of the sweep once, and see that every run finds enough of it."""
        runs = self._runs()
        if not runs:
            runs = [self.definition.run_config(first_proposal(self.definition), self.definition.seeds[0])]
        seen: set[tuple] = set()
        for config in runs:
            sections = (DataConfig, TaskConfig, MeasureConfig)
            fields = (name for section in sections for name in section.model_fields)
            fields = (*fields, "vocab_size", "seq_len", "batch_tokens")
            shape = tuple(getattr(config, name) for name in fields)
            if shape not in seen:
                check_source(open_source(config, self.results / "data"), config)
                seen.add(shape)

    def _runs(self) -> list[RunConfig]:
        """The runs that are known by now."""
        return [planned.config for planned in self.plan.runs(self.finished)]

    def _missing(self, study: optuna.Study) -> list[Task]:
        def is_done(item: Task) -> bool:
            return all(self.finished.is_complete(run_id) for run_id in self.plan.run_ids(item))

        return queue.missing(study, self.plan.items(self.finished), is_done)

    def _refill(self, study: optuna.Study) -> int:
        """Enqueue what is neither done nor in hand, except what failed too often. Returns the queue's length."""
        queue.release_lost(study, self.results)
        queue.enqueue(study, [item for item in self._missing(study) if not self._given_up(item)])
        queue.set_open(study, self.plan.is_open(self.finished))
        return queue.waiting(study)

    def _given_up(self, item: Task) -> bool:
        return any(self._failed_for_good(run_id) for run_id in self.plan.run_ids(item))

    def _failed_for_good(self, run_id: str) -> bool:
        work = Scratch(self.results, run_id)
        return len(work.failures()) >= self.machine.max_attempts or work.infeasible() is not None

    def _watch(self, study: optuna.Study, pool: Pool) -> None:
        """Until nothing waits and every worker has ended: show the state, replace the dead, pass a stop on."""
        failures = Failures(self._failed_for_good)
        runs, ended = self._runs(), 0
        failures.see(scan(self.results, self.definition, runs), before=True)
        before: tuple[int, int] | None = None
        while True:
            if not pool.members:
                now = self._refill(study), len(failures.known)
                if not now[0] or now == before or pool.asked or pool.has_failed:
                    break
                before = now  # a round of workers that changes nothing is the last
                pool.fill(now[0])
            time.sleep(0.3)
            states = scan(self.results, self.definition, runs)
            self.watch(states)
            if failures.see(states, before=False):
                pool.deaths = 0
            if (self.stop() or failures.too_many) and not pool.asked:
                pool.stop()
            now_ended = sum(state.state in ENDED for state in states)
            died = pool.reap()
            if died:
                check_room(self.results)
            if died or (self.definition.tune and now_ended > ended):
                pool.fill(self._refill(study))  # the dead are replaced; what has ended may say what comes next
                runs, ended = self._runs(), now_ended
        self._explain(failures, pool)

    def _explain(self, failures: "Failures", pool: Pool) -> None:
        """Raise ValueError for what made the sweep give up."""
        if failures.too_many:
            raise ValueError(
                f"{len(failures.in_a_row)} runs failed one after the other, the last with: {failures.last_reason}. "
                f"Their logs are {self.results / 'work'}/*/log.txt; mend the cause and give the same command again "
                f"with --retry-failed"
            )
        if pool.has_failed:
            raise ValueError(
                f"{pool.deaths} workers died with no run completed in between; the last lines of "
                f"{self.results / 'work'}/worker-*.log say why. Finished runs are kept: mend the cause and give the "
                f"same command again"
            )


def work(results: Path, machine: Machine, watch: Callable[[list[RunState]], None], storage: str | None = None) -> Stop:
    """Workers alone, beside the driver of the same sweep on another machine, until nothing waits.

    Returns the Stop, which knows whether a signal came. Raises ValueError for a folder that no sweep fills.
    """
    definition = read_definition(results)
    if definition is None:
        raise ValueError(f"{results} is no folder of a sweep; start `sparsedepth sweep FILE --out {results}` first")
    url = storage or queue.storage_url(results)
    stop = stop_on_signals()
    runs = planned_runs(definition, results)
    # A driver counts its workers from 0: numbers far from those, since they seed the samplers.
    first = 1000 + secrets.randbelow(10**6) * 1000
    with explained(url, results), Pool(results, url, machine, next_number=first) as pool:
        study = connect(definition, url)
        pool.fill(queue.waiting(study))
        while pool.members:
            time.sleep(0.3)
            watch(scan(results, definition, runs))
            if stop() and not pool.asked:
                pool.stop()
            if pool.reap():
                check_room(results)
                pool.fill(queue.waiting(study))
    if pool.has_failed:
        raise ValueError(f"{pool.deaths} workers died; the last lines of {results / 'work'}/worker-*.log say why")
    return stop


class Failures:
    """Counts the runs that have failed since the last one that was completed."""

    def __init__(self, for_good: Callable[[str], bool]):
        self.for_good = for_good
        self.known: set[str] = set()
        self.in_a_row: list[str] = []
        self.last_reason: str | None = None

    def see(self, states: list[RunState], *, before: bool) -> bool:
        """Note what has changed since the last call; what ended `before` this invocation does not count.

        Returns whether a run has been completed since.
        """
        completed = False
        for state in states:
            failed = state.state == "failed" and self.for_good(state.run_id)
            if state.run_id in self.known or not (failed or state.state == "complete"):
                continue
            self.known.add(state.run_id)
            if failed and not before:
                self.in_a_row.append(state.run_id)
                self.last_reason = state.reason
            elif not failed:
                self.in_a_row.clear()
                completed = True
        return completed

    @property
    def too_many(self) -> bool:
        return len(self.in_a_row) >= MAX_FAILURES


def claim(results: Path, definition: SweepDefinition) -> None:
    """Make `results` the folder of this sweep. Raises ValueError where it is another's, or cannot be written."""
    refuse_pack(results)
    try:
        results.mkdir(parents=True, exist_ok=True)
        before = read_definition(results)
        if before and (before.name, before.base) != (definition.name, definition.base):
            differing = sorted(
                key for key in {*before.base, *definition.base} if before.base.get(key) != definition.base.get(key)
            )
            what = f"base differs in {', '.join(differing)}" if before.name == definition.name else repr(before.name)
            raise ValueError(
                f"{results} holds another sweep ({what}), not {definition.name!r}; choose another --out, or delete it"
            )
        content = definition.model_dump(mode="json", exclude_unset=True, exclude={"scales"})
        files.write_text(results / DEFINITION, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise ValueError(f"{results} cannot be written ({error.strerror}); choose another --out") from None


def drop_leftovers(results: Path) -> None:
    """Delete the checkpoints of runs that died between the end of their record and the end of their process."""
    for marker in results.glob(f"runs/*/{record.MARKER}"):
        work = Scratch(results, marker.parent.name)
        if work.checkpoints.exists() and not is_owned(work.lock):
            shutil.rmtree(work.checkpoints, ignore_errors=True)


def varied(definition: SweepDefinition, config: RunConfig) -> str:
    """The fields in which a run differs from its siblings, for a line of progress."""
    return " ".join(f"{name}={getattr(config, name)}" for name in (*definition.varied, "seed"))
