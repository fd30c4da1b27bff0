"""The overhead of a run: from the request to its first step, and from its last step to its record.

    python benchmarks/overhead.py --runs 10

Tiny decoders with one step that measure only the loss, in turn as in a sweep (forked by the forkserver) and in fresh
interpreters. Seconds of wall time, median over runs and range; the forkserver starts once per sweep.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.data.pipeline import prepare
from sparsedepth.run.process import thread_environment
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import run_record
from sparsedepth.sweep.forkserver import EXECUTE, prepare_server, start_run

MODEL = dict(n_layers=2, d_model=16, n_heads=2, seq_len=32, precision="fp32")
DATA = dict(batch_tokens=128, train_tokens=128, measures=["loss"], val_tokens=512, max_corpus_tokens=100_000)

Start = Callable[[list[str], Path, Callable[[], bool]], int]
"""(arguments of execute, log, called often) -> exit code"""


def fresh(arguments: list[str], log: Path, look: Callable[[], bool]) -> int:
    """A run in a fresh interpreter."""
    with open(log, "ab") as output:
        command = [sys.executable, "-m", EXECUTE, *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=thread_environment(1))
    while (code := process.poll()) is None:
        look()
        time.sleep(0.005)
    return code


def forked(arguments: list[str], log: Path, look: Callable[[], bool]) -> int:
    """A run forked by the forkserver."""
    process = start_run(arguments, log)
    while (code := process.exitcode) is None:
        look()
        time.sleep(0.005)
    return code


def measure(results: Path, seed: int, start: Start) -> tuple[float, float]:
    """Seconds until the first (and last) step is done, and from there to the complete record."""
    config = build(RunConfig, {**MODEL, **DATA, "seed": seed}, "benchmark")
    prepare(config, results / "data")
    scratch = Scratch(results, config.run_id)
    scratch.folder.mkdir(parents=True)
    run_record.write_config(scratch.folder, config)
    stepped: list[float] = []

    def look() -> bool:
        progress = scratch.progress()
        if not stepped and progress is not None and progress.phase == "training":
            stepped.append(progress.at)
        return False

    asked = time.time()
    arguments = [str(results), str(scratch.folder / "config.yaml"), "--runtime", '{"device": "cpu", "threads": 1}']
    code = start(arguments, scratch.log, look)
    assert code == 0 and stepped, scratch.log.read_text()
    complete = (run_record.run_folder(results, config.run_id) / run_record.MARKER).stat().st_mtime
    return stepped[0] - asked, complete - stepped[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        begun = time.perf_counter()
        prepare_server(threads=1)
        measure(results, 0, forked)
        print(f"the forkserver's start and its first run: {time.perf_counter() - begun:.2f} s")
        variants: dict[str, Start] = {"forked by the forkserver": forked, "in a fresh interpreter": fresh}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for number in range(runs):
            for offset, (name, start) in enumerate(variants.items()):
                times[name].append(measure(results, 1 + len(variants) * number + offset, start))
    for name, pairs in times.items():
        print(f"{name}:")
        for what, values in zip(("to the first step", "from the last step"), zip(*pairs, strict=True), strict=True):
            print(f"  {what:18} {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
