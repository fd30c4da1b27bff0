"""A worker runs tasks of the queue, one process at a time: a process for each run, or for runs of one shape as one
stacked model (`train.stack`); and tells the study how they ended.

The sweep process calls `advance` on each of its workers a few times a second; waiting code is a generator that yields.
Workers of other processes and machines take tasks of the same study; a run's lease ensures a single writer. The states
of one run (`Worker.run`):

    requested --> stop requested? -------------------------------------- yes --> the task returns to the queue (WAITING)
        ^         complete? pruned? too large? failed too often? ------- yes --> the task ends (COMPLETE, PRUNED, FAIL)
        |              | no
        |         pending (`_pending_runs`) until the worker has no process; dropped if a stop is requested
        |              |
        +-------- in the process (`_process_steps`), alone or in a stack, until it ends (`_try_once` records the end);
                  gets SIGTERM if a stop is requested
"""

from collections.abc import Callable, Collection, Generator, Sequence
from multiprocessing.process import BaseProcess

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from sparsedepth.config.role import can_stack
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Fields
from sparsedepth.plan.tasks import Task
from sparsedepth.run import lease
from sparsedepth.run.process import INTERRUPTED, NO_STORAGE, oom_kills
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import run_record
from sparsedepth.sweep import forkserver, storage, trial_queue
from sparsedepth.sweep.machine import Machine
from sparsedepth.sweep.results_folder import ResultsIndex
from sparsedepth.words.plain_text import last_line

START_SECONDS = 600.0
"""Time limit for the first heartbeat of a run's lease; torchrun imports torch again."""

DONE = object()
"""In place of a generator's next step."""


class StoppedError(Exception):
    """The worker was asked to stop; the run has written its checkpoint."""


class FailedError(Exception):
    """The run reached the maximum number of failures."""


class Worker:
    def __init__(self, machine: Machine, results_index: ResultsIndex, stop: Callable[[], bool], number: int = 0):
        """`number`: index among the machine's workers, which determines its GPUs."""
        self.machine = machine
        self.results_index = results_index
        self.stop = stop
        self.number = number
        assert results_index.definition is not None
        self.results = results_index.results
        self.definition = results_index.definition
        self.server_deaths = 0
        self.no_storage = False
        """whether a run ended because the results folder could not be written"""
        self.task_steps: dict[int, Generator[None]] = {}
        """generator of each trial's task, by trial number"""
        self._pending_runs: dict[str, RunConfig] = {}
        """runs that the tasks wait for, by run_id"""
        self._unstacked: set[str] = set()
        """runs whose stack failed; each runs alone, to find the cause"""
        self._process_steps: Generator[None] | None = None
        self._process: BaseProcess | None = None

    @property
    def is_idle(self) -> bool:
        return not self.task_steps and self._process_steps is None

    def take(self, queue: trial_queue.Queue, n_workers: int, taken: Collection[int]) -> bool:
        """Take the next task, and tasks that can be stacked with it. Returns whether there was one."""
        own = queue.take(n_workers, self.machine.stack_size, taken)
        self.task_steps |= {trial.number: self._finish_task(trial, task) for trial, task in own}
        return bool(own)

    def advance(self) -> None:
        """Continue without blocking. Raises errors of the study's storage; the trial is then lost."""
        for number, steps in [*self.task_steps.items()]:
            is_over = True  # also if it raises: a generator that has raised cannot go on
            try:
                is_over = next(steps, DONE) is DONE
            finally:
                if is_over:
                    del self.task_steps[number]
        if self._process_steps is None and self.stop():
            self._pending_runs.clear()
        if self._process_steps is None and self._pending_runs:
            first, *others = self._pending_runs.values()
            stack = [first]
            for other in others:
                if not {first.run_id, other.run_id} & self._unstacked and can_stack(*stack, other):
                    stack.append(other)
            self._process_steps = self._compute(stack[: self.machine.stack_size(first)])
        if self._process_steps is not None and next(self._process_steps, DONE) is DONE:
            self._process_steps = None

    def abandon(self) -> None:
        """Ask the run to stop, without waiting; its trial is given back once the lease is free."""
        if self._process is not None and self._process.is_alive():
            self._process.terminate()

    def _finish_task(self, trial: optuna.Trial, task: Task) -> Generator[None]:
        """Compute the runs of a task, a stack at a time, and tell the study how it ended."""
        try:
            configs = trial_queue.configs_of(trial, task, self.definition)
            size = self.machine.stack_size(configs[0])
            summaries = []
            for start in range(0, len(configs), size):
                runs = [self.run(config, trial) for config in configs[start : start + size]]
                summaries += yield from _all_of(runs)
            trial_queue.check_repeat(trial, task)
            values = trial_queue.values_of(trial, self.definition, summaries)
            trial_queue.tell(trial, TrialState.COMPLETE, values)
        except StoppedError:
            trial_queue.give_back(trial)
        except optuna.TrialPruned:
            trial_queue.tell(trial, TrialState.PRUNED)
        except (trial_queue.RepeatError, FailedError):
            trial_queue.tell(trial, TrialState.FAIL)
        except UpdateFinishedTrialError:
            pass  # another process presumed this one dead and finished the trial

    def run(self, config: RunConfig, trial: optuna.Trial) -> Generator[None, None, Fields]:
        """The summary of a run, computed in a separate process unless it is complete.

        Raises TrialPruned if the run was pruned or is infeasible, FailedError if it failed too often."""
        while True:
            if self.stop():
                raise StoppedError
            if self.results_index.is_complete(config.run_id):
                return run_record.read_run(run_record.run_folder(self.results, config.run_id)).summary
            if end := self.results_index.recorded_end(Scratch(self.results, config.run_id)):
                trial.set_user_attr(end.state, end.reason)
                if end.state == "failed":
                    raise FailedError
                if end.state == "infeasible":
                    trial_queue.constrain(trial, "memory", 1.0)
                raise optuna.TrialPruned
            self._pending_runs[config.run_id] = config
            try:
                while config.run_id in self._pending_runs:
                    yield
            finally:  # not needed any more if another seed has ended the trial
                self._pending_runs.pop(config.run_id, None)

    def _compute(self, configs: list[RunConfig]) -> Generator[None]:
        """Compute runs in one process; afterwards they are no longer pending, whatever the result."""
        try:
            yield from self._try_once(configs)
        finally:
            for config in configs:
                self._pending_runs.pop(config.run_id, None)

    def _try_once(self, configs: list[RunConfig]) -> Generator[None]:
        """Run the process once, and record a failure that it could not record itself. Without storage, or after too
        many deaths of the forkserver, the driver gives up; the runs of a stack that failed run alone."""
        config = configs[0]
        scratch = Scratch(self.results, configs[0].run_id)
        if storage.problem(self.results):  # of a folder that was moved away, no other is made at its old place
            self.no_storage = True
            return
        before = scratch.recorded()
        kills = oom_kills()
        try:
            code = yield from self._watch_process(configs)
        except forkserver.ServerDied:
            code = forkserver.SERVER_DIED
        if code in (0, INTERRUPTED):
            return
        if code == forkserver.SERVER_DIED:
            self.server_deaths += 1
        elif code == NO_STORAGE or storage.problem(self.results):
            self.no_storage = True
        elif len(configs) > 1:
            self._unstacked |= {config.run_id for config in configs}
        elif self.stop() or scratch.recorded() != before:
            pass  # asked to stop, or it has recorded its failure itself
        elif code == -9 and oom_kills() > kills:  # the kernel counts its own SIGKILLs
            share = -(-config.sequences_per_step // (self.machine.processes_per_run * self.machine.nodes))
            scratch.halve_micro_batch(
                before.micro_batch or self.machine.runtime.micro_batch or share, "killed by the kernel"
            )
        else:
            said = last_line(scratch.read_log().decode(errors="replace"), "no output")
            reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}: {said}"
            scratch.add_failure(reason)

    def _watch_process(self, configs: list[RunConfig]) -> Generator[None, None, int]:
        """Start the process and wait until it ends; returns its exit code, negative for a signal."""
        machine = self.machine
        scratches = [Scratch(self.results, config.run_id) for config in configs]
        for scratch, config in zip(scratches, configs, strict=True):
            scratch.folder.mkdir(parents=True, exist_ok=True)
            run_record.write_config(scratch.folder, config)
        arguments = [str(self.results), *(str(scratch.folder / "config.yaml") for scratch in scratches)]
        arguments += ["--runtime", machine.runtime.model_dump_json(), "--concurrent-processes", str(machine.workers)]
        arguments += ["--sharing", str(-(-machine.workers // max(1, len(machine.gpus))))]
        for scratch in scratches[1:]:
            scratch.note_leader(scratches[0])
        gpus = machine.gpus[self.number % len(machine.gpus)] if machine.gpus else []
        process = forkserver.start_run(
            arguments,
            scratches[0].log,
            threads=machine.runtime.threads or 1,
            processes=machine.processes_per_run,
            nodes=machine.nodes,
            gpus=gpus,
        )
        self._process = process
        monitors = [lease.HeartbeatMonitor(scratch.lock) for scratch in scratches]
        is_terminated = False
        while (code := process.exitcode) is None:
            if self.stop() and not is_terminated:
                process.terminate()
                is_terminated = True
            # The runs of a stack release their leases one after the other, so the most recent heartbeat counts.
            silent_seconds = min(monitor.silent_seconds() for monitor in monitors)
            has_started = any(monitor.has_changed for monitor in monitors)
            # Twice the grace period, since the run itself may be waiting for a silent holder.
            if silent_seconds > (2 * lease.GRACE_SECONDS if has_started else START_SECONDS):
                forkserver.kill(process)
                if process.exitcode is None:
                    return forkserver.SERVER_DIED
            yield
        process.close()
        self._process = None
        return code


def _all_of(runs: Sequence[Generator[None, None, Fields]]) -> Generator[None, None, list[Fields]]:
    """Wait for several runs; returns their summaries. If one raises, the others are closed."""
    summaries = {}
    try:
        while True:
            for number, run in enumerate(runs):
                try:
                    if number not in summaries:
                        next(run)
                except StopIteration as end:
                    summaries[number] = end.value
            if len(summaries) == len(runs):
                return [summaries[number] for number in range(len(runs))]
            yield
    finally:
        for run in runs:
            run.close()
