"""CPU seconds of each command that answers a question, as a user starts it.

    python benchmarks/answers.py                      the table for results/depth_study, a minimum of 3 runs
    python benchmarks/answers.py --folder DIR --repeats 5 --checkout OTHER    beside those of another checkout, in turns

CPU seconds of the process and its children, user and system, so that other work on the machine hardly counts.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS = {
    "import pandas, duckdb": ["-c", "import pandas, duckdb"],
    "effects": ["effects", "{folder}"],
    "recipe": ["recipe", "{folder}"],
    "plot --figure depth": ["plot", "{folder}", "--figure", "depth", "-o", "{out}/figure.png"],
    "report": ["report", "{folder}", "-o", "{out}/report.html"],
    "best": ["best", "{folder}"],
    "status": ["status", "{folder}"],
    "query": ["query", "{folder}", "select count(*) from runs"],
}
WANTED = {"effects": 1.5, "recipe": 1.5, "plot --figure depth": 2.5, "report": 8.0}


def cpu_seconds(checkout: Path, command: list[str], folder: Path) -> float:
    """Of one run of the command with the checkout's package. Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as out:
        arguments = [part.format(folder=folder, out=out) for part in command]
        module = [] if arguments[0] == "-c" else ["-m", "sparsedepth.cli.main"]
        before = os.times()
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, *module, *arguments], check=True, env=environment, cwd=checkout, stdout=subprocess.DEVNULL
        )
        after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    here = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=here / "results/depth_study")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkout", type=Path, help="another checkout, timed in turns")
    parser.add_argument("--only", nargs="*", choices=[*COMMANDS], default=[*COMMANDS])
    given = parser.parse_args()
    checkouts = [here, *([given.checkout.resolve()] if given.checkout else [])]
    print(
        "| command | "
        + " | ".join(["CPU s", "other"][: len(checkouts)])
        + " | wanted |\n"
        + "|---" * (len(checkouts) + 2)
        + "|"
    )
    for name in given.only:
        least = [float("inf")] * len(checkouts)
        for _ in range(given.repeats):
            for index, checkout in enumerate(checkouts):
                least[index] = min(least[index], cpu_seconds(checkout, COMMANDS[name], given.folder.resolve()))
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in least)} | {WANTED.get(name, '')} |", flush=True)


if __name__ == "__main__":
    main()
