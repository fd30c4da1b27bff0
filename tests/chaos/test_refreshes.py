"""Readers that refresh for days: their memory after a quarter of 200 refreshes (20 of a report) is that at the end,
beside a folder that grows."""

import json
import os
import subprocess
import sys

import pytest

REFRESHES = 200
CODE = """
import gc, json, sys
from pathlib import Path
from support.made_up_runs import make_run
from sparsedepth.config.run import RunConfig

results, kind, n = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def add(seed):
    layers = [{"step": 1, "layer": 1, "metric": "residual_variance", "value": 1.0, "n": 8}]
    make_run(results, RunConfig(n_layers=2, seed=seed), {"val_loss": 3 + seed % 7 / 100}, layers=layers)

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if kind == "query":
    from sparsedepth.store.connection import open_store

    def refresh():
        with open_store(results) as store:
            store.sql("select avg(value), avg(val_loss) from runs join layers using (run_id)")
elif kind == "status":
    from sparsedepth.cli.status import StatusCommand

    def refresh():
        StatusCommand(results).compute()
else:
    from sparsedepth.report.page import write_report

    def refresh():
        write_report([results], results.parent / "report.html")

for seed in range(36):
    add(seed)
sizes = []
for number in range(n):
    if number % 10 == 0:
        add(1000 + number)
    refresh()
    sizes.append(resident())
print(json.dumps(sizes))
"""


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["query", "status", "report"])
def test_memory_of_a_watcher_stays_flat(tmp_path, kind):
    tests = os.path.dirname(os.path.dirname(__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    n = REFRESHES // 10 if kind == "report" else REFRESHES  # a page takes seconds
    command = [sys.executable, "-c", CODE, str(tmp_path / "results"), kind, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])
    early, late = max(sizes[: n // 4]), max(sizes)
    print(f"\n{kind}: {early / 2**20:.0f} MiB after {n // 4} refreshes, {late / 2**20:.0f} MiB after {n}")
    assert late < 1.1 * early
