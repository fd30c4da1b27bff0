"""One run, from its config to a complete run folder. `python -m sparsedepth.run.execute` is the process of one run.

A complete run is recognised by its run_id and left as it is; a damaged one is set aside and made again. One process of
all that may want the run holds its lease; `RunJob` trains, measures and writes.
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Generator
from pathlib import Path

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.config.sweep import read_definition
from sparsedepth.run.allocation import allocation
from sparsedepth.run.lease import Beat, Lease, Stopped, hold
from sparsedepth.run.prune import PrunedRun, Pruner
from sparsedepth.run.scratch import Scratch
from sparsedepth.run.signals import INFEASIBLE, INTERRUPTED, USER_ERROR, end_with_parent, stop_on_signals
from sparsedepth.run.train_and_measure import DEFAULT_OPTIONS, Infeasible, Options, RunJob
from sparsedepth.store import run_record
from sparsedepth.store.pack import refuse_pack
from sparsedepth.train import checkpoint
from sparsedepth.train.devices import LostError, process_group, world
from sparsedepth.train.loop import Interrupted, Work, run_generator
from sparsedepth.train.stack import Clock, train_together


def execute(config: RunConfig, results: Path, options: Options = DEFAULT_OPTIONS) -> Path:
    """Make the run of `config` complete in `results`, and return its folder.

    Raises ValueError for what the user must mend (no such corpus, too little text, no such device), Interrupted once
    options.stop() is true or another process has taken the run (the same call then continues), Infeasible; LostError
    where one of the processes that torchrun has started for this run ends before the others. Of those the first holds
    the lease, measures and writes; the others train with it and wait.
    """
    return run_generator(execution(config, results, options))


def execution(config: RunConfig, results: Path, options: Options = DEFAULT_OPTIONS) -> Work[Path]:
    """`execute` as a generator: where it yields, other runs of a stack take their step (`train_together`)."""
    refuse_pack(results)
    target = run_record.run_folder(results, config.run_id)
    scratch = Scratch(results, config.run_id)
    try:
        with process_group(options.runtime) as devices:
            if devices.is_leader:
                held = hold(scratch.lock, options.stop or (lambda: False), options.beat)
                with held as lease, _interrupted_if_lost(lease):
                    missing = devices.broadcast_from_leader(int(not _is_whole(target, scratch)))
                    if missing:
                        scratch.begin(allocation(options.concurrent_processes * (len(options.stacked_with) + 1)))
                        yield from RunJob(config, results, scratch, lease, devices, options).run()
                    _clean(scratch)
            elif devices.broadcast_from_leader(0):
                yield from RunJob(config, results, scratch, None, devices, options).run()
            devices.wait_for_leader()
    except Stopped:
        raise Interrupted from None
    except LostError:
        if options.stop and options.stop():
            raise Interrupted from None  # all were asked to stop, and another was faster
        raise
    return target


@contextlib.contextmanager
def _interrupted_if_lost(lease: Lease) -> Generator[None]:
    """Whatever goes wrong in a run that another process has taken is no failure of the run."""
    try:
        yield
    except Exception:
        if lease.is_valid():
            raise
        raise Interrupted from None


def _is_whole(target: Path, scratch: Scratch) -> bool:
    """Whether the run is complete; a damaged or unfinished record is moved out of the way."""
    if not target.exists():
        return False
    problem = run_record.problem(target)
    if not problem:
        return True
    logging.warning("%s. Set aside and made again.", problem)
    target.rename(scratch.folder / f"damaged-{time.time_ns()}")
    return False


def _clean(scratch: Scratch) -> None:
    """Drop what a finished run has no use for."""
    with contextlib.suppress(OSError):  # another process, taken for dead, may be writing one more
        checkpoint.remove(scratch.checkpoints)
    for left in scratch.folder.glob("record-*"):
        shutil.rmtree(left, ignore_errors=True)
    scratch.clear_failures()


class ProgressWriter:
    """Writes into the scratch folder how the run stands: at each new phase, and twice a second."""

    def __init__(self, scratch: Scratch):
        self.scratch = scratch
        self.phase = ""
        self.started = time.monotonic()
        self.written_at = 0.0
        self.began: tuple[float, float] | None = None

    def __call__(self, phase: str, done: float, loss: float | None) -> None:
        now = time.monotonic()
        if phase == self.phase and now - self.written_at < 0.5:
            return
        if phase == "training" and self.began is None:
            self.began = now, done
        left = None
        if self.began and done > self.began[1]:
            left = (1 - done) * (now - self.began[0]) / (done - self.began[1])
        self.scratch.write_progress(phase, done, loss, left, now - self.started)
        self.phase, self.written_at = phase, now


def _pruner(config: RunConfig, results: Path) -> Pruner | None:
    """What ends a run of this folder's sweep early, if anything does."""
    definition = read_definition(results)
    return Pruner(definition.prune, config, results) if definition and definition.prune else None


def main(arguments: list[str]) -> int:
    """The process of one run, or of a stack of runs, which ends with the worst code of them.

    0 complete, 2 the user must mend something, 75 interrupted, 76 infeasible, 1 failed.
    """
    parser = argparse.ArgumentParser(prog="sparsedepth.run.execute")
    parser.add_argument("results", type=Path)
    parser.add_argument("configs", type=Path, nargs="+", help="of runs that can train as one stacked model")
    parser.add_argument("--runtime", type=json.loads, default={}, help="RuntimeConfig, as JSON")
    parser.add_argument(
        "--concurrent-processes", type=int, default=1, help="processes of runs at a time, this one included"
    )
    given = parser.parse_args(arguments)
    stop = stop_on_signals()
    end_with_parent(os.getppid())
    configs = [build(RunConfig, read_yaml(path), str(path)) for path in given.configs]
    configs.sort(key=lambda config: config.run_id)  # two processes that want the same leases ask in one order
    scratches = [Scratch(given.results, config.run_id) for config in configs]
    clocks = [Clock() for _ in configs]
    leads = world()[0] == 0  # of several processes one reports and prunes
    works = []
    for config, scratch, clock in zip(configs, scratches, clocks, strict=True):
        options = Options(
            runtime=build(RuntimeConfig, given.runtime, "--runtime"),
            stop=stop,
            report=ProgressWriter(scratch) if leads else None,
            prune=_pruner(config, given.results) if leads else None,
            stacked_with=tuple(other.run_id for other in configs if other is not config),
            clock=clock,
            concurrent_processes=given.concurrent_processes,
            beat=Beat(scratch.lock),
        )
        works.append(execution(config, given.results, options))
    ends = zip(train_together(works, clocks), scratches, strict=True)
    return max((_exit_code(end, scratch) for end, scratch in ends), key=WORST.index)


WORST = (0, INTERRUPTED, INFEASIBLE, USER_ERROR, 1)


def _exit_code(end: Path | Exception, scratch: Scratch) -> int:
    """What the process says of a run that ended so; the reason of a failure is noted."""
    match end:
        case Path():
            return 0
        case PrunedRun():
            scratch.prune(end.pruned)
            return INTERRUPTED
        case Interrupted():
            return INTERRUPTED
        case Infeasible():
            logging.error("%s", end)
            return INFEASIBLE
        case LostError():  # a consequence: the cause is the other process's to tell
            logging.error("%s", end)
            return 1
    traceback.print_exception(end)
    is_users = isinstance(end, ValueError)
    message = str(end).splitlines()[0] if str(end) else "no message"
    scratch.add_failure(str(end) if is_users else f"{type(end).__name__}: {message}")
    return USER_ERROR if is_users else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
