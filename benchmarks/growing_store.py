"""How much memory and time does a store of thousands of runs take, and how long does a reader wait beside a writer?

    python benchmarks/growing_store.py [--runs 5000] [--refreshes 20] [--folder DIR]

The runs are those of `benchmarks/query.py`. Prints, each in a process of its own: peak memory and wall time of the
first opening, of the first query of a table, and of both again; then the wall time of a refresh (opening, and a query
of `runs` or a table) while nothing is written, and while a writer adds two runs a second, median and largest, and its
processor time, which other load affects less. The exit status is 1
beyond a limit: 1 GB, 1.5 s in the median.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from query import DEPTHS, fill, real_runs, write_run

from sparsedepth.config.load import build, yaml_text
from sparsedepth.config.run import RunConfig

MEGABYTES, SECONDS = 1000, 1.5
PERIOD = 0.5
"""Seconds between two new runs."""
OPENING = """
import json, resource, sys, time
began = time.perf_counter()
from sparsedepth.store.connection import open_store
with open_store(sys.argv[1]) as store:
    rows = store.sql(sys.argv[2]).rows
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(json.dumps([peak, time.perf_counter() - began, time.process_time(), str(rows)]))
"""
RUNS, LAYERS = "select count(*), avg(val_loss) from runs", "select count(*), avg(value) from layers"
REFRESHES = """
import json, sys, time
from sparsedepth.store.connection import open_store
walls, cpus = [], []
for _ in range(int(sys.argv[3])):
    began, cpu = time.perf_counter(), time.process_time()
    with open_store(sys.argv[1]) as store:
        store.sql(sys.argv[2])
    walls.append(time.perf_counter() - began)
    cpus.append(time.process_time() - cpu)
    time.sleep(0.2)
print(json.dumps([walls, cpus]))
"""


def in_a_process(code: str, *arguments: object) -> list:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(printed.splitlines()[-1])


def write_until(results: Path, ended: threading.Event) -> int:
    """Add a run every PERIOD; how many."""
    summary, files = real_runs()[DEPTHS[0]][0]
    cell = build(RunConfig, {"n_layers": DEPTHS[0], "lr": 3e-3}, "benchmark")
    text, n = yaml_text(cell.model_dump(mode="json")), 0
    while not ended.wait(PERIOD):
        config = cell.model_copy(update={"seed": int(time.time() * 10) % 10**8})
        write_run(results, config, text.replace("seed: 0", f"seed: {config.seed}"), summary, files)
        n += 1
    return n


def refresh(results: Path, name: str, sql: str, n_refreshes: int, has_writer: bool) -> float:
    """Print how long refreshes took; the median wall time."""
    ended, written = threading.Event(), [0]
    writer = threading.Thread(target=lambda: written.append(write_until(results, ended)))
    if has_writer:
        writer.start()
    walls, cpus = in_a_process(REFRESHES, results, sql, n_refreshes)
    ended.set()
    if has_writer:
        writer.join()
    print(
        f"refresh {name:23} median {statistics.median(walls):.2f} s of {SECONDS}, at most {max(walls):.2f} s, "
        f"processor {statistics.median(cpus):.2f} s ({n_refreshes} refreshes, {written[-1]} new runs)",
        flush=True,
    )
    return statistics.median(walls)


def measure(results: Path, n_refreshes: int) -> bool:
    """Whether all limits hold."""
    shutil.rmtree(results / ".cache", ignore_errors=True)
    peaks = []
    for name, sql in (("first", RUNS), ("first, a table", LAYERS), ("again", RUNS), ("again, a table", LAYERS)):
        peak, wall, cpu, rows = in_a_process(OPENING, results, sql)
        peaks.append(peak)
        print(f"{name:16} {peak:7.0f} MB of {MEGABYTES}   {wall:6.2f} s, processor {cpu:.2f} s   {rows}", flush=True)
    waits = [
        refresh(results, f"{name}, {table}", sql, n_refreshes, has_writer)
        for name, has_writer in (("alone", False), ("beside a writer", True))
        for table, sql in (("runs", RUNS), ("a table", LAYERS))
    ]
    return max(peaks) < MEGABYTES and max(waits) < SECONDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--refreshes", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where the store is kept; else in a temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        results = given.folder or Path(temporary, "results")
        if not results.exists():
            results.mkdir()
            fill(results, given.runs)
        return int(not measure(results, given.refreshes))


if __name__ == "__main__":
    sys.exit(main())
