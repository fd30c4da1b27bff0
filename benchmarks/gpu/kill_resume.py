"""A sweep whose driver gets kill -9 while runs train; the same command then continues.

    python benchmarks/gpu/kill_resume.py OUT [--workers 2] [--scale tiny]

The kill comes once a run is complete. Prints what is left of its processes, the table of runs and the facts of their
manifests; fails if the sweep does not end, or trains a complete run again. OUT/a.sweep.tgz holds the records.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from visit import pack

HERE = Path(__file__).parent
KILL_SECONDS = 60.0
"""The kill comes then at the latest."""

SELECT = (
    "select n_layers, depth_scale, count(*) as runs, round(avg(val_loss), 3) as loss, "
    "round(avg(needed_layers), 1) as needed, round(avg(causal_score), 4) as causal, "
    "round(avg(residual_variance_last), 2) as variance, round(avg(training_seconds), 1) as seconds, "
    "any_value(device) as device from runs group by all order by all"
)
FACTS = ("run_id", "seconds", "training_seconds", "peak_memory_bytes", "precision", "compiled", "cuda_graph")


def complete(results: Path) -> dict[str, int]:
    """The complete runs, with the time of their marker."""
    return {path.parent.name: path.stat().st_mtime_ns for path in sorted(results.glob("runs/*/complete"))}


def show_processes() -> None:
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv"], check=False)


def kill_once_a_run_is_complete(command: list[str], results: Path, log: Path) -> dict[str, int]:
    """Start the sweep and kill its driver; the runs that were complete then."""
    began = time.monotonic()
    with log.open("w") as file:
        driver = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    while driver.poll() is None and not complete(results) and time.monotonic() - began < KILL_SECONDS:
        time.sleep(0.2)
    show_processes()
    if driver.poll() is None:
        os.kill(driver.pid, signal.SIGKILL)
    code, finished = driver.wait(), complete(results)
    how = "killed" if code == -signal.SIGKILL else f"the driver had ended by itself with {code}"
    print(f"{how} after {time.monotonic() - began:.0f} s with {len(finished)} runs complete", flush=True)
    if code > 0:
        sys.exit(log.read_text()[-2000:])
    time.sleep(2)
    show_processes()
    return finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--scale")
    given = parser.parse_args()
    results = given.out / "sweep"
    shutil.rmtree(results, ignore_errors=True)
    sparsedepth = [sys.executable, "-m", "sparsedepth.cli.main"]
    command = [*sparsedepth, "sweep", str(HERE / "sweep.yaml"), "--out", str(results), "--workers", given.workers]
    command += ["--scale", given.scale] if given.scale else []
    finished = kill_once_a_run_is_complete(command, results, given.out / "a.killed.txt")
    pack(results, given.out / "a.sweep.tgz")
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"resumed: exit {done.returncode} after {time.monotonic() - began:.0f} s")
    pack(results, given.out / "a.sweep.tgz")
    if done.returncode:
        sys.exit(done.stdout[-1000:] + done.stderr[-2000:])
    subprocess.run([*sparsedepth, "query", str(results), SELECT], check=True)
    for path in sorted(results.glob("runs/*/manifest.json")):
        manifest = json.loads(path.read_text())
        print({name: manifest.get(name) for name in FACTS})
    after = complete(results)
    if again := [run for run, at in finished.items() if after.get(run) != at]:
        sys.exit(f"complete runs were trained again: {again}")


if __name__ == "__main__":
    main()
