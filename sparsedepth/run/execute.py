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
from sparsedepth.run.lease import Lease, Stopped, hold
from sparsedepth.run.process import INFEASIBLE, INTERRUPTED, USER_ERROR, end_with_parent, stop_on_signals
from sparsedepth.run.prune import PrunedRun, Pruner
from sparsedepth.run.scratch import Scratch
from sparsedepth.run.train_and_measure import DEFAULT_OPTIONS, Infeasible, Options, RunJob
from sparsedepth.store import folder as record
from sparsedepth.store.pack import refuse_pack
from sparsedepth.train import checkpoint
from sparsedepth.train.devices import LostError, joined, world
from sparsedepth.train.loop import Interrupted


def execute(config: RunConfig, results: Path, options: Options = DEFAULT_OPTIONS) -> Path:
    """Make the run of `config` complete in `results`, and return its folder.

    Raises ValueError for what the user must mend (no such corpus, too little text, no such device), Interrupted once
    options.stop() is true or another process has taken the run (the same call then continues), Infeasible; LostError
    where one of the processes that torchrun has started for this run ends before the others. Of those the first holds
    the lease, measures and writes; the others train with it and wait.
    """
    refuse_pack(results)
    target = record.run_folder(results, config.run_id)
    scratch = Scratch(results, config.run_id)
    try:
        with joined(options.runtime) as devices:
            if devices.first:
                with hold(scratch.lock, options.stop or (lambda: False)) as lease, _interrupted_if_lost(lease):
                    missing = devices.first_says(int(not _is_whole(target, scratch)))
                    if missing:
                        RunJob(config, results, scratch, lease, devices, options).run()
                    _clean(scratch)
            elif devices.first_says(0):
                RunJob(config, results, scratch, None, devices, options).run()
            devices.wait_for_first()
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
    problem = record.problem(target)
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
    scratch.forget_failures()


class ProgressWriter:
    """Writes into the scratch folder how the run stands: at each new phase, and twice a second."""

    def __init__(self, scratch: Scratch):
        self.scratch = scratch
        self.phase = ""
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
        self.scratch.write_progress(phase, done, loss, left)
        self.phase, self.written_at = phase, now


def _pruner(config: RunConfig, results: Path) -> Pruner | None:
    """What ends a run of this folder's sweep early, if anything does."""
    definition = read_definition(results)
    return Pruner(definition.prune, config, results) if definition and definition.prune else None


def main(arguments: list[str]) -> int:
    """The process of one run: 0 complete, 2 the user must mend something, 75 interrupted, 76 infeasible, 1 failed."""
    parser = argparse.ArgumentParser(prog="sparsedepth.run.execute")
    parser.add_argument("results", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--runtime", type=json.loads, default={}, help="RuntimeConfig, as JSON")
    given = parser.parse_args(arguments)
    stop = stop_on_signals()
    end_with_parent(os.getppid())
    config = build(RunConfig, read_yaml(given.config), str(given.config))
    scratch = Scratch(given.results, config.run_id)
    leads = world()[0] == 0  # of several processes one reports and prunes
    options = Options(
        runtime=build(RuntimeConfig, given.runtime, "--runtime"),
        stop=stop,
        report=ProgressWriter(scratch) if leads else None,
        prune=_pruner(config, given.results) if leads else None,
    )
    try:
        execute(config, given.results, options)
    except Interrupted:
        return INTERRUPTED
    except PrunedRun as ended:
        scratch.prune(ended.pruned)
        return INTERRUPTED
    except Infeasible as shortage:
        logging.error("%s", shortage)
        return INFEASIBLE
    except LostError as lost:  # a consequence: the cause is the other process's to tell
        logging.error("%s", lost)
        return 1
    except Exception as error:
        traceback.print_exc()
        is_users = isinstance(error, ValueError)
        message = str(error).splitlines()[0] if str(error) else "no message"
        scratch.add_failure(str(error) if is_users else f"{type(error).__name__}: {message}")
        return USER_ERROR if is_users else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
