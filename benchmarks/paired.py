"""Is reading from outside as fast as in another checkout? Alternating pairs of the same commands, in new processes.

    git clone . OTHER && git -C OTHER checkout COMMIT
    python benchmarks/paired.py OTHER [--runs 5000] [--rows 10000] [--pairs 3]

The first query of `runs` and of `layers` in a results folder without a cache, and in a pack; `import` and `judge` of a
table. The other checkout, the older one, writes the folder. Prints the ratio of this checkout's CPU seconds to the
other's: the median over the pairs, the least and the largest; and the medians themselves."""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
MAP = """
source: benchmark
fields:
  n_layers: {of: depth}
  d_model: {of: width}
  lr: {of: lr}
  seed: {of: seed}
  val_loss: {of: loss}
"""
COMMANDS = {
    "first query of runs": ["query", "{of}/results", "select count(*), avg(val_loss) from runs"],
    "first query of layers": ["query", "{of}/results", "select count(*), avg(value) from layers"],
    "layers of a pack": ["query", str(HERE / "results/depth_study"), "select count(*), avg(value) from layers"],
    "runs of a pack": ["query", str(HERE / "results/depth_study"), "select count(*), avg(val_loss) from runs"],
    "import": ["import", "{of}/table.csv", "--map", "{of}/map.yaml", "-o", "{of}/imported"],
    "judge": ["judge", "{of}/table.csv", "--column", "variant=depth", "--baseline", "2"],
}


def cpu_seconds(checkout: Path, words: list[str], of: Path) -> float:
    """Of one run of the command, its children too, without a cache and without what it wrote before."""
    shutil.rmtree(of / "results" / ".cache", ignore_errors=True)
    shutil.rmtree(of / "imported", ignore_errors=True)
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(of / "bytecode")}  # as where it is installed
    environment = {**os.environ, **bytecode, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sparsedepth.cli.main", *(word.format(of=of) for word in words)]
    before = os.times()
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True)
    after = os.times()
    if done.returncode not in (0, 3, 4):  # of `judge`
        sys.exit(f"{checkout}: {' '.join(command)}\n{done.stderr}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def prepare(other: Path, of: Path, n_runs: int, n_rows: int) -> None:
    code = "import sys; from pathlib import Path; from query import fill; fill(Path(sys.argv[1]), int(sys.argv[2]))"
    (of / "results").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{other}{os.pathsep}{other / 'benchmarks'}"}
    subprocess.run(
        [sys.executable, "-c", code, str(of / "results"), str(n_runs)], check=True, env=environment, cwd=other
    )
    rows = [(2 + 2 * (n % 4), 64, 1e-3, n // 4, 3 - 0.1 * (n % 4) + (n * 7919 % 1000) / 1e5) for n in range(n_rows)]
    lines = [",".join(map(str, row)) for row in [("depth", "width", "lr", "seed", "loss"), *rows]]
    (of / "table.csv").write_text("\n".join(lines))
    (of / "map.yaml").write_text(MAP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    other = given.other.resolve()
    with tempfile.TemporaryDirectory() as folder:
        of = Path(folder)
        prepare(other, of, given.runs, given.rows)
        print(f"{'':22} ratio  (range)        here     other, CPU seconds, medians of {given.pairs} pairs")
        for name, words in COMMANDS.items():
            for checkout in (HERE, other):
                cpu_seconds(checkout, words, of)  # compiles what is imported
            pairs = [(cpu_seconds(HERE, words, of), cpu_seconds(other, words, of)) for _ in range(given.pairs)]
            ratios = [ours / theirs for ours, theirs in pairs]
            ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{name:22} {statistics.median(ratios):5.2f}  {spread:16} {ours:6.2f}  {theirs:6.2f}", flush=True)


if __name__ == "__main__":
    main()
