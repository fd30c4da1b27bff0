"""A worker: takes items from the study's queue, gives each run a process of its own, and tells the study how it ended.

`python -m sparsedepth.sweep.worker RESULTS NUMBER` reads RESULTS/sweep.yaml, and from its input the URL of the study,
which may hold a password. Workers know nothing of each other: the study hands out the items, and a run's lock keeps
it to one writer, so any number of them may work on one sweep, on any number of machines.
"""

import argparse
import json
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.trial import TrialState

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.definition_file import read_definition
from sparsedepth.run.lease import is_owned, owned
from sparsedepth.run.process import INTERRUPTED, end_with_parent, stop_on_signals
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import folder as record
from sparsedepth.store.find import is_whole
from sparsedepth.sweep import study as queue
from sparsedepth.sweep.forkserver import Nursery

IDLE_SECONDS = 0.5
"""Between two looks at an empty queue, while other workers' runs may still be given back to it."""


class StoppedError(Exception):
    """The worker was asked to stop; the run has written its checkpoint."""


class FailedError(Exception):
    """The run failed as often as it may."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    definition: SweepDefinition
    results: Path
    runtime: RuntimeConfig
    max_attempts: int
    stop: Callable[[], bool]
    lease: str
    nursery: Nursery

    def objective(self, trial: optuna.Trial) -> list[float]:
        """Run the trial's item to its end: the means of the objectives over its seeds.

        Raises TrialPruned where a run diverged, was pruned or cannot be made, FailedError where it keeps failing.
        """
        item = queue.item_of(trial)
        if item is None:
            raise optuna.TrialPruned("the queue is empty")
        trial.set_user_attr("lease", self.lease)
        summaries = []
        for config in queue.configs_of(trial, item, self.definition):
            trial.set_user_attr(f"run_id_seed_{config.seed}", config.run_id)
            summaries.append(self.run(config, trial))
        return queue.values_of(trial, self.definition, summaries)

    def run(self, config: RunConfig, trial: optuna.Trial) -> dict:
        """The summary of a run that is complete, or is made so in a process of its own."""
        work = Scratch(self.results, config.run_id)
        while True:
            if self.stop():
                raise StoppedError
            if is_whole(self.results, config.run_id):
                return record.read_run(record.run_folder(self.results, config.run_id)).summary
            if self.definition.prune and (pruned := work.pruned()):
                trial.set_user_attr("pruned", pruned.reason)
                raise optuna.TrialPruned(pruned.reason)
            if shortage := work.infeasible():
                trial.set_constraint("memory", 1.0)
                trial.set_user_attr("infeasible", shortage)
                raise optuna.TrialPruned(f"run {config.run_id} does not fit into memory: {shortage}")
            failures = work.failures()
            if len(failures) >= self.max_attempts:
                trial.set_user_attr("failed", failures[-1])
                raise FailedError(f"run {config.run_id} failed {len(failures)} times; the last time: {failures[-1]}")
            fitting = work.micro_batch()
            code = self._process(config, work)
            if code and self.stop():  # it was stopped, perhaps before it could handle signals
                raise StoppedError
            # No failure: it was interrupted alone, or found out that it needs smaller pieces.
            said = work.infeasible() or work.micro_batch() != fitting or len(work.failures()) > len(failures)
            if code not in (0, INTERRUPTED) and not said:  # it died without a word of its own
                work.add_failure(f"killed by signal {-code}" if code < 0 else f"exit code {code}: {work.last_words()}")

    def _process(self, config: RunConfig, work: Scratch) -> int:
        work.folder.mkdir(parents=True, exist_ok=True)
        record.write_config(work.folder, config)
        arguments = [str(self.results), str(work.folder / "config.yaml"), "--runtime", self.runtime.model_dump_json()]
        return self.nursery.run(arguments, work.log, self.stop)


def main(arguments: list[str]) -> int:
    """Scratch until nothing is left to do (0) or a signal asks to stop (75)."""
    parser = argparse.ArgumentParser(prog="sparsedepth.sweep.worker")
    parser.add_argument("results", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("--runtime", type=json.loads, default={}, help="RuntimeConfig, as JSON")
    parser.add_argument("--processes-per-run", type=int, default=1)
    parser.add_argument("--max-attempts", type=int, default=2)
    parser.add_argument("--lease", default=uuid.uuid4().hex)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args(arguments)
    stop = stop_on_signals()
    end_with_parent(given.parent)
    url = sys.stdin.readline().strip()
    definition = read_definition(given.results)
    assert definition is not None, "the driver writes it before it starts a worker"
    runtime = build(RuntimeConfig, given.runtime, "--runtime")
    worker = Worker(
        definition=definition,
        results=given.results,
        runtime=runtime,
        max_attempts=given.max_attempts,
        stop=stop,
        lease=given.lease,
        nursery=Nursery(given.results, threads=runtime.threads or 1, processes_per_run=given.processes_per_run),
    )
    path = queue.lease_path(given.results, given.lease)
    with owned(path):
        empty_the_queue(worker, queue.open_study(definition, url), given.number)
        path.unlink(missing_ok=True)
    return INTERRUPTED if stop() else 0


def empty_the_queue(worker: Worker, study: optuna.Study, number: int) -> None:
    """Take items until none waits and no worker has one that may come back, or until asked to stop."""
    while not worker.stop():
        if queue.waiting(study):
            study.sampler = queue.make_sampler(worker.definition, study, number)
            try:
                study.optimize(worker.objective, n_trials=1, catch=(FailedError,))
            except StoppedError:
                return
            except (optuna.exceptions.UpdateFinishedTrialError, ValueError) as error:
                # This worker was taken for dead, and another has told the trial's end: that stands.
                if isinstance(error, ValueError) and not str(error).startswith("Cannot tell a"):
                    raise
        elif queue.is_open(study) or _others_run(worker, study):
            optuna.storages.fail_stale_trials(study)  # which puts them into the queue again
            time.sleep(IDLE_SECONDS)
        else:
            return


def _others_run(worker: Worker, study: optuna.Study) -> bool:
    leases = [trial.user_attrs.get("lease") for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]
    return any(lease and is_owned(queue.lease_path(worker.results, lease)) for lease in leases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
