"""Run tasks of the queue, one process at a time: a process for each run, or for runs of one shape as one stacked model
(`train.stack`); tell the study how they ended.

Workers live in the process of the sweep, which calls `advance` on each of them a few times a second: whatever waits is
a generator that yields. Workers of other processes and machines take tasks of the same study; a run's lease keeps the
run to one writer. The states of one run (`Worker.run`):

    asked for --> asked to stop? --------------------------------------- yes --> the task waits again (WAITING)
        ^         complete? pruned? too large? failed too often? ------- yes --> the task ends (COMPLETE, PRUNED, FAIL)
        |              | no
        |         wanted (`_wanted_runs`), until the worker has no process; dropped when asked to stop
        |              |
        |         in the process (`_process_steps`), by itself or as a stack; gets SIGTERM when asked to stop
        |              |
        +--------------+ it has ended: with 0 or 75 (interrupted) nothing is to be noted; after any other code
                         of one run      a failure is noted, by the run or here; if memory ran out, half the micro-batch
                         of a stack      each of its runs is tried by itself
                         the forkserver  died, which is counted; after too many the driver gives up
"""

from collections.abc import Callable, Generator, Sequence
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
from sparsedepth.plan.tasks import Task
from sparsedepth.run import lease
from sparsedepth.run.process import oom_kills
from sparsedepth.run.scratch import Scratch
from sparsedepth.run.signals import INTERRUPTED
from sparsedepth.store import run_record
from sparsedepth.sweep import forkserver, trial_queue
from sparsedepth.sweep.machine import Machine
from sparsedepth.train.stack import can_stack

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
    _task_steps: dict[int, Generator[None]] = field(init=False, repr=False, default_factory=dict)
    """what advances the task of each trial in hand, by the trial's number"""
    _wanted_runs: dict[str, RunConfig] = field(init=False, repr=False, default_factory=dict)
    """the runs that the tasks wait for, by run_id"""
    _alone: set[str] = field(init=False, repr=False, default_factory=set)
    """runs whose stack has died: each is tried by itself, so that it is seen whose fault that was"""
    _process_steps: Generator[None] | None = field(init=False, repr=False, default=None)
    """what advances the process; None while there is none"""
    _process: BaseProcess | None = field(init=False, default=None, repr=False)

    @property
    def is_idle(self) -> bool:
        return not self._task_steps and self._process_steps is None

    @property
    def trials(self) -> set[int]:
        """The numbers of the trials that it has taken."""
        return {*self._task_steps}

    def take(self, study: optuna.Study, lease_id: str, config_of: Callable[[Task], RunConfig], share: int = 1) -> bool:
        """Take the next task of the queue, and others that can train with it: `share` in all, where a stack of so many
        pays. Returns whether there was one."""
        trial = trial_queue.take(study, self.definition, lease_id)
        if trial is None:
            return False
        self._task_steps[trial.number] = self._finish_task(trial)
        first = trial_queue.task_of(trial)
        assert first is not None
        if first.cell is None:
            return True  # of a proposal the seeds are a stack: what the sampler learns from it is waited for
        stack = [config_of(first)]

        def fits(task: Task) -> bool:
            return task.cell is not None and can_stack(*stack, config_of(task))

        for _ in range(min(share, self.machine.stack_of(stack[0])) - 1):
            trial = trial_queue.take(study, self.definition, lease_id, fits)
            if trial is None:
                break
            self._task_steps[trial.number] = self._finish_task(trial)
            task = trial_queue.task_of(trial)
            assert task is not None
            stack.append(config_of(task))
        return True

    def advance(self) -> None:
        """Go on as far as possible without waiting. Raises what the study's storage raises; the trial is then lost."""
        for number, steps in [*self._task_steps.items()]:
            try:
                next(steps)
            except StopIteration:
                del self._task_steps[number]
            except BaseException:
                del self._task_steps[number]  # a generator that has raised cannot go on
                raise
        if self._process_steps is None and self.stop():
            self._wanted_runs.clear()
        if self._process_steps is None and self._wanted_runs:
            self._process_steps = self._make_runs(self._next_stack())
        if self._process_steps is not None:
            try:
                next(self._process_steps)
            except StopIteration:
                self._process_steps = None

    def _next_stack(self) -> list[RunConfig]:
        """The first run that is waited for, with those that can train with it."""
        first, *others = self._wanted_runs.values()
        if first.run_id in self._alone:
            return [first]
        stack = [first]
        for other in others:
            if other.run_id not in self._alone and can_stack(*stack, other):
                stack.append(other)
        return stack[: self.machine.stack_of(first)]

    def abandon(self) -> None:
        """Ask the run to stop, without waiting for it; its trial is given back when the lease is seen to be free."""
        if self._process is not None and self._process.is_alive():
            self._process.terminate()

    def _finish_task(self, trial: optuna.Trial) -> Generator[None]:
        """Run the trial's task to its end, and tell the study."""
        task = trial_queue.task_of(trial)
        assert task is not None
        try:
            configs = trial_queue.configs_of(trial, task, self.definition)
            for config in configs:
                trial.set_user_attr(f"run_id_seed_{config.seed}", config.run_id)
            size = self.machine.stack_of(configs[0])
            summaries = []
            for start in range(0, len(configs), size):
                runs = [self.run(config, trial) for config in configs[start : start + size]]
                summaries += yield from _side_by_side(runs)
            trial_queue.check_repeat(trial, task)
            values = trial_queue.values_of(trial, self.definition, summaries)
        except StoppedError:
            trial_queue.give_back(trial.study, trial)
        except trial_queue.RepeatError as repeat:
            trial.set_user_attr("repeats", str(repeat))
            trial_queue.tell(trial, TrialState.FAIL)
        except optuna.TrialPruned:
            trial_queue.tell(trial, TrialState.PRUNED)
        except FailedError:
            trial_queue.tell(trial, TrialState.FAIL)
        except UpdateFinishedTrialError:
            pass  # this process was taken for dead, and another has told the trial's end: that stands
        else:
            trial_queue.tell(trial, TrialState.COMPLETE, values)

    def run(self, config: RunConfig, trial: optuna.Trial) -> Generator[None, None, dict[str, Any]]:
        """The summary of a run that is complete, or is made so in a process of its own.

        Raises TrialPruned where the run was pruned or cannot be made, FailedError where it keeps failing.
        """
        scratch = Scratch(self.results, config.run_id)
        while True:
            if self.stop():
                raise StoppedError
            if self.results_index.is_complete(config.run_id):
                return run_record.read_run(run_record.run_folder(self.results, config.run_id)).summary
            if self.definition.prune and (pruned := scratch.pruned()):
                trial.set_user_attr("pruned", pruned.reason)
                raise optuna.TrialPruned(pruned.reason)
            if shortage := scratch.infeasible():
                trial_queue.constrain(trial, "memory", 1.0)
                trial.set_user_attr("infeasible", shortage)
                raise optuna.TrialPruned(f"run {config.run_id} does not fit into memory: {shortage}")
            failures = scratch.failures()
            if len(failures) >= self.machine.max_attempts:
                trial.set_user_attr("failed", failures[-1])
                raise FailedError(f"run {config.run_id} failed {len(failures)} times; the last time: {failures[-1]}")
            self._wanted_runs[config.run_id] = config
            try:
                while config.run_id in self._wanted_runs:
                    yield
            finally:  # nobody waits for it where another seed has ended its trial
                self._wanted_runs.pop(config.run_id, None)

    def _make_runs(self, configs: list[RunConfig]) -> Generator[None]:
        """Make these runs in one process; whatever comes of it, they are no longer wanted."""
        try:
            yield from self._try_once(configs)
        finally:
            for config in configs:
                self._wanted_runs.pop(config.run_id, None)

    def _try_once(self, configs: list[RunConfig]) -> Generator[None]:
        """Run the process once, and note a death that it could not note itself."""
        config, scratch = configs[0], Scratch(self.results, configs[0].run_id)
        before = scratch.micro_batch(), scratch.infeasible(), len(scratch.failures())
        kills = oom_kills()
        try:
            code = yield from self._watch_process(configs)
        except forkserver.ServerDied:
            code = forkserver.SERVER_DIED
        if code == forkserver.SERVER_DIED:
            self.server_deaths += 1
            return
        if len(configs) > 1:
            if code not in (0, INTERRUPTED):
                self._alone |= {config.run_id for config in configs}
            return
        after = scratch.micro_batch(), scratch.infeasible(), len(scratch.failures())
        # No failure: it was asked to stop, was interrupted alone, or found out that it needs smaller pieces.
        if code in (0, INTERRUPTED) or self.stop() or after != before:
            return
        # SIGKILL may come from anyone; the kernel counts its own.
        if code == -9 and oom_kills() > kills:
            sequences = config.batch_tokens // config.seq_len
            tried = (
                before[0]
                or self.machine.runtime.micro_batch
                or -(-sequences // (self.machine.processes_per_run * self.machine.nodes))
            )
            scratch.lower_memory(tried, "killed by the kernel, which had run out of memory")
        else:
            reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}: {scratch.last_log_line()}"
            scratch.add_failure(reason)

    def _watch_process(self, configs: list[RunConfig]) -> Generator[None, None, int]:
        """Start the process of the runs and watch it until it ends: its exit code, negative for a signal."""
        machine, scratches = self.machine, [Scratch(self.results, config.run_id) for config in configs]
        for scratch, config in zip(scratches, configs, strict=True):
            scratch.folder.mkdir(parents=True, exist_ok=True)
            run_record.write_config(scratch.folder, config)
        arguments = [str(self.results), *(str(scratch.folder / "config.yaml") for scratch in scratches)]
        arguments += ["--runtime", machine.runtime.model_dump_json(), "--concurrent-processes", str(machine.workers)]
        for scratch in scratches[1:]:
            scratch.refer_to(scratches[0])
        gpus = machine.gpus[self.number % len(machine.gpus)] if machine.gpus else []
        process = forkserver.start_run(
            arguments, scratches[0].log, processes=machine.processes_per_run, nodes=machine.nodes, gpus=gpus
        )
        self._process = process
        beats = [lease.Beat(scratch.lock) for scratch in scratches]
        asked = False
        while (code := process.exitcode) is None:
            if self.stop() and not asked:
                process.terminate()
                asked = True
            # A stack's runs let go of their leases one after the other.
            still, has_moved = min(beat.still_seconds() for beat in beats), any(beat.has_moved for beat in beats)
            # Twice: the run itself may be waiting for another holder that has fallen silent.
            if still > (2 * lease.GRACE_SECONDS if has_moved else START_SECONDS):
                forkserver.kill(process)
                if process.exitcode is None:
                    return forkserver.SERVER_DIED
            yield
        process.close()
        self._process = None
        return code


def _side_by_side(runs: Sequence[Generator[None, None, dict[str, Any]]]) -> Generator[None, None, list[dict[str, Any]]]:
    """The summaries of runs that are waited for together; where one raises, the others are not waited for."""
    summaries: dict[int, dict[str, Any]] = {}
    try:
        while True:
            for number, run in enumerate(runs):
                if number not in summaries:
                    try:
                        next(run)
                    except StopIteration as end:
                        summaries[number] = end.value
            if len(summaries) == len(runs):
                return [summaries[number] for number in range(len(runs))]
            yield
    finally:
        for run in runs:
            run.close()
