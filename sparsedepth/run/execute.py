"""One run, from its config to a complete run folder. `python -m sparsedepth.run.execute` is the process of one run.

A complete run is recognised by its run_id and kept; a damaged one is set aside and repeated. Only the process that
holds the run's lease computes it; `RunJob` trains, measures and writes."""

import argparse
import json
import logging
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.config.sweep import read_definition
from sparsedepth.files import storage_problem
from sparsedepth.run.lease import HeartbeatMonitor, Stopped, hold
from sparsedepth.run.process import INFEASIBLE, INTERRUPTED, NO_STORAGE, PARENT, USER_ERROR, Stop, end_with_parent
from sparsedepth.run.prune import PrunedRun, Pruner
from sparsedepth.run.scratch import Scratch, TimeLeft, allocation
from sparsedepth.run.step_choice import choose_steps
from sparsedepth.run.train_and_measure import DEFAULT_OPTIONS, Infeasible, Options, RunJob
from sparsedepth.store import run_record
from sparsedepth.store.packs import refuse_pack
from sparsedepth.train.devices import LostError, process_group, world
from sparsedepth.train.loop import Interrupted, Work, run_generator
from sparsedepth.train.runtime import find_device
from sparsedepth.train.stack import Clock, train_together

WORST = (0, INTERRUPTED, INFEASIBLE, NO_STORAGE, USER_ERROR, 1)
"""Exit codes from best, complete, to worst, failed."""


def execute(config: RunConfig, results: Path, options: Options = DEFAULT_OPTIONS) -> Path:
    """Complete the run of `config` in `results`, and return its folder.

    Raises ValueError for user errors; Interrupted once options.stop() is true or another process has taken over the run
    (the same call then resumes); Infeasible; LostError if one of the torchrun processes of this run ends before the
    others, of which the first holds the lease, measures and writes; the others train with it and wait."""
    refuse_pack(results)
    scratch = Scratch(results, config.run_id)
    scratch.refuse_links()
    scratch.folder.mkdir(parents=True, exist_ok=True)
    return run_generator(execution(config, results, options))


def execution(config: RunConfig, results: Path, options: Options) -> Work[Path]:
    """`execute` as a generator: at each yield the other runs of a stack take their step (`train_together`)."""
    refuse_pack(results)
    target = run_record.run_folder(results, config.run_id)
    scratch = Scratch(results, config.run_id)
    scratch.refuse_links()
    try:
        with process_group(options.runtime) as devices:
            if devices.is_leader:
                with hold(scratch.lock, options.stop, options.heartbeat) as lease:
                    try:
                        if devices.broadcast_from_leader(int(not _is_complete(target, scratch))):
                            scratch.begin(allocation(options.concurrent_processes * (len(options.stacked_with) + 1)))
                            yield from RunJob(config, scratch, lease, devices, options).run()
                        scratch.delete_leftovers()
                        scratch.clear_failures()
                    except Exception:
                        if lease.is_valid():
                            raise
                        raise Interrupted from None  # another process has taken over the run
            elif devices.broadcast_from_leader(0):
                yield from RunJob(config, scratch, None, devices, options).run()
            devices.wait_for_leader()
    except Stopped:
        raise Interrupted from None
    except LostError:
        if options.stop():
            raise Interrupted from None  # all processes were asked to stop, and another stopped first
        raise
    return target


def _is_complete(target: Path, scratch: Scratch) -> bool:
    """Whether the run is complete; a damaged or unfinished record is set aside."""
    if not target.exists():
        return False
    problem = run_record.problem(target)
    if not problem:
        return True
    logging.warning("%s. The record is set aside and the run repeated.", problem)
    target.rename(scratch.folder / f"damaged-{time.time_ns()}")
    return False


@dataclass
class ProgressWriter:
    """Writes the run's progress to its scratch folder, at each new phase and twice a second."""

    scratch: Scratch
    phase: str = ""
    started: float = field(default_factory=time.monotonic)
    written_at: float = 0.0
    time_left: TimeLeft = field(default_factory=TimeLeft)

    def __call__(self, phase: str, done: float, loss: float | None) -> None:
        now = time.monotonic()
        if phase == self.phase and now - self.written_at < 0.5:
            return
        self.scratch.write_progress(phase, done, loss, self.time_left(done), now - self.started)
        self.phase = phase
        self.written_at = now


def main(arguments: list[str]) -> int:
    """The process of one run, or of a stack of runs; the exit code is the worst of the runs'."""
    parser = argparse.ArgumentParser(prog="sparsedepth.run.execute")
    parser.add_argument("results", type=Path)
    parser.add_argument("configs", type=Path, nargs="+", help="of runs that can train as one stacked model")
    parser.add_argument("--runtime", type=json.loads, default={}, help="RuntimeConfig as JSON")
    parser.add_argument("--concurrent-processes", type=int, default=1, help="run processes in parallel, including this")
    parser.add_argument("--sharing", type=int, default=1, help="those of them that share a GPU")
    given = parser.parse_args(arguments)
    stop = Stop().catch()
    end_with_parent(int(os.environ.get(PARENT) or os.getppid()))
    runtime = build(RuntimeConfig, given.runtime, "--runtime")
    configs = [build(RunConfig, read_yaml(path), str(path)) for path in given.configs]
    configs.sort(key=lambda config: config.run_id)  # leases are taken in one order, so that processes do not deadlock
    if len(configs) > 1 and find_device(runtime.device).type == "cuda":
        runtime = choose_steps(configs, runtime, given.results)
    scratches = [Scratch(given.results, config.run_id) for config in configs]
    clocks = [Clock() for _ in configs]
    is_leader = world()[0] == 0  # only one of several processes reports and prunes
    definition = read_definition(given.results) if is_leader else None
    rule = definition.prune if definition else None
    works = []
    for config, scratch, clock in zip(configs, scratches, clocks, strict=True):
        options = Options(
            runtime=runtime,
            stop=stop,
            report=ProgressWriter(scratch) if is_leader else DEFAULT_OPTIONS.report,
            prune=Pruner(rule, config, given.results) if rule else DEFAULT_OPTIONS.prune,
            stacked_with=tuple(other.run_id for other in configs if other is not config),
            clock=clock,
            concurrent_processes=given.concurrent_processes,
            sharing=given.sharing,
            heartbeat=HeartbeatMonitor(scratch.lock),
        )
        works.append(execution(config, given.results, options))
    ends = zip(train_together(works, clocks, runtime.stack), scratches, strict=True)
    return max((_exit_code(end, scratch) for end, scratch in ends), key=WORST.index)


def _exit_code(end: Path | Exception, scratch: Scratch) -> int:
    """The exit code for the end of a run; the reason of a failure is recorded in the scratch folder."""
    match end:
        case Path():
            return 0
        case PrunedRun():
            scratch.prune(end.step, end.reason)
            scratch.delete_leftovers()
            return INTERRUPTED
        case Interrupted():
            return INTERRUPTED
        case Infeasible() | LostError():  # of a lost process the other reports the cause
            logging.error("%s", end)
            return INFEASIBLE if isinstance(end, Infeasible) else 1
    if reason := storage_problem(end):
        logging.error("%s cannot be written: %s", scratch.results, reason)
        return NO_STORAGE
    traceback.print_exception(end)
    is_user_error = isinstance(end, ValueError)
    message = str(end).splitlines()[0] if str(end) else "no message"
    scratch.add_failure(str(end) if is_user_error else f"{type(end).__name__}: {message}")
    return USER_ERROR if is_user_error else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
