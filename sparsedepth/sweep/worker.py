"""A worker: a place for one run at a time. It takes a task from the queue, gives each of its runs a process of its own,
and tells the study how it ended.

Workers live in the process of the sweep, which advances each of them a few times a second: what waits here, yields.
Those of other processes and machines work on the same study; it hands out the tasks, and a run's lease keeps the run to
one writer.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.results_index import ResultsIndex
from sparsedepth.run import lease
from sparsedepth.run.allocation import allocation
from sparsedepth.run.process import INTERRUPTED, oom_kills
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import folder as record
from sparsedepth.sweep import forkserver
from sparsedepth.sweep import study as queue
from sparsedepth.sweep.machine import Machine

START_SECONDS = 600.0
"""How long a run may need until its lease beats for the first time: torchrun imports torch anew."""


class StoppedError(Exception):
    """The worker was asked to stop; the run has written its checkpoint."""


class FailedError(Exception):
    """The run failed as often as it may."""


@dataclass(kw_only=True)
class Worker:
    definition: SweepDefinition
    results: Path
    machine: Machine
    results_index: ResultsIndex
    stop: Callable[[], bool]
    number: int = 0
    """among the machine's workers: which GPUs it has"""
    server_deaths: int = 0
    """how often the forkserver died under a run of this worker"""
    trial: optuna.Trial | None = None
    """what it has taken; None while it is idle"""
    _performance: Generator[None] = field(init=False, repr=False)
    _process: BaseProcess | None = field(init=False, default=None, repr=False)

    def take(self, study: optuna.Study, lease_id: str) -> bool:
        """Begin with the next task of the queue. Returns whether there was one."""
        self.trial = queue.take(study, self.definition, lease_id)
        if self.trial is None:
            return False
        self._performance = self._perform(self.trial)
        return True

    def advance(self) -> None:
        """Go on as far as possible without waiting. Raises what the study's storage raises; the trial is then lost."""
        if self.trial is not None:
            try:
                next(self._performance)
            except StopIteration:
                self.trial = None
            except BaseException:
                self.trial = None
                raise

    def abandon(self) -> None:
        """Ask the run to stop, without waiting for it; its trial is given back when the lease is seen to be free."""
        if self._process is not None and self._process.is_alive():
            self._process.terminate()

    def _perform(self, trial: optuna.Trial) -> Generator[None]:
        """Run the trial's task to its end, and tell the study."""
        task = queue.task_of(trial)
        assert task is not None
        try:
            summaries = []
            for config in queue.configs_of(trial, task, self.definition):
                trial.set_user_attr(f"run_id_seed_{config.seed}", config.run_id)
                summaries.append((yield from self.run(config, trial)))
            queue.check_repeat(trial, task)
            values = queue.values_of(trial, self.definition, summaries)
        except StoppedError:
            queue.give_back(trial.study, trial)
        except queue.RepeatError as repeat:
            trial.set_user_attr("repeats", str(repeat))
            queue.tell(trial, TrialState.FAIL)
        except optuna.TrialPruned:
            queue.tell(trial, TrialState.PRUNED)
        except FailedError:
            queue.tell(trial, TrialState.FAIL)
        except UpdateFinishedTrialError:
            pass  # this process was taken for dead, and another has told the trial's end: that stands
        else:
            queue.tell(trial, TrialState.COMPLETE, values)

    def run(self, config: RunConfig, trial: optuna.Trial) -> Generator[None, None, dict[str, Any]]:
        """The summary of a run that is complete, or is made so in a process of its own.

        Raises TrialPruned where the run was pruned or cannot be made, FailedError where it keeps failing.
        """
        scratch = Scratch(self.results, config.run_id)
        while True:
            if self.stop():
                raise StoppedError
            if self.results_index.is_complete(config.run_id):
                return record.read_run(record.run_folder(self.results, config.run_id)).summary
            if self.definition.prune and (pruned := scratch.pruned()):
                trial.set_user_attr("pruned", pruned.reason)
                raise optuna.TrialPruned(pruned.reason)
            if shortage := scratch.infeasible():
                queue.constrain(trial, "memory", 1.0)
                trial.set_user_attr("infeasible", shortage)
                raise optuna.TrialPruned(f"run {config.run_id} does not fit into memory: {shortage}")
            failures = scratch.failures()
            if len(failures) >= self.machine.max_attempts:
                trial.set_user_attr("failed", failures[-1])
                raise FailedError(f"run {config.run_id} failed {len(failures)} times; the last time: {failures[-1]}")
            yield from self._attempt(config, scratch)

    def _attempt(self, config: RunConfig, scratch: Scratch) -> Generator[None]:
        """One process of the run, from its start to its end; a death without a word of its own is noted here."""
        before = scratch.micro_batch(), scratch.infeasible(), len(scratch.failures())
        kills = oom_kills()
        try:
            code = yield from self._process_of(config, scratch)
        except forkserver.ServerDied:
            code = forkserver.SERVER_DIED
        if code == forkserver.SERVER_DIED:
            self.server_deaths += 1
            return
        after = scratch.micro_batch(), scratch.infeasible(), len(scratch.failures())
        # No failure: it was asked to stop, was interrupted alone, or found out that it needs smaller pieces.
        if code in (0, INTERRUPTED) or self.stop() or after != before:
            return
        if code == -9 and oom_kills() > kills:
            sequences = config.batch_tokens // config.seq_len
            tried = before[0] or self.machine.runtime.micro_batch or -(-sequences // self.machine.processes_per_run)
            scratch.lower_memory(tried, "killed by the kernel, which had run out of memory")
        else:
            reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}: {scratch.last_log_line()}"
            scratch.add_failure(reason)

    def _process_of(self, config: RunConfig, scratch: Scratch) -> Generator[None, None, int]:
        """Start the run's process and see it through: its exit code, negative for a signal."""
        machine = self.machine
        scratch.folder.mkdir(parents=True, exist_ok=True)
        record.write_config(scratch.folder, config)
        if given := allocation():
            scratch.write_allocation(given)
        arguments = [str(self.results), str(scratch.folder / "config.yaml")]
        arguments += ["--runtime", machine.runtime.model_dump_json()]
        gpus = machine.gpus[self.number % len(machine.gpus)] if machine.gpus else []
        process = forkserver.start_run(arguments, scratch.log, processes=machine.processes_per_run, gpus=gpus)
        self._process = process
        beat = lease.Beat(scratch.lock)
        asked = False
        while (code := process.exitcode) is None:
            if self.stop() and not asked:
                process.terminate()
                asked = True
            # Twice: the run itself may be waiting for another holder that has fallen silent.
            if beat.still_seconds() > (2 * lease.GRACE_SECONDS if beat.has_moved else START_SECONDS):
                forkserver.kill(process)
                if process.exitcode is None:
                    return forkserver.SERVER_DIED
            yield
        process.close()
        self._process = None
        return code
