"""How long do short commands take, and the start of a sweep? With --against, compared with another checkout, in turn.

    python benchmarks/startup.py [--against CHECKOUT] [--repeats 9] [--only "measure"]

Prints median and quartiles of processor time in seconds, with that of all processes that a command leaves, which
other load affects least. 'train one step and measure' is start-up and measures of a run of the depth study; 'a sweep of
one step' has one run, of which only the loss is measured; 'a finished sweep again' has four.
"""

import argparse
import contextlib
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

HERE = Path(__file__).parents[1]
STUDY, QUICKSTART = (str(HERE / "results" / name) for name in ("depth_study", "quickstart"))
SELECT = "select count(*) from runs"


def seconds(checkout: Path, words: Sequence[str]) -> float:
    """Processor time of a command."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sparsedepth.cli.main", *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, env=environment, cwd=checkout
    )
    with contextlib.suppress(ChildProcessError):
        while True:  # the forkserver, which a sweep leaves to end by itself
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def described(values: Sequence[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def adopt_orphans() -> None:
    """Have the kernel (Linux) give this process those whose parent has died: their time is then counted, too."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="the commands whose names contain this")
    given = parser.parse_args()
    sides = [*filter(None, (given.against, HERE))]
    adopt_orphans()
    with tempfile.TemporaryDirectory() as temporary:
        run_file = Path(temporary) / "run.yaml"
        study = yaml.safe_load((HERE / "sparsedepth/examples/depth_study.yaml").read_text())
        run_file.write_text(yaml.safe_dump({**study["base"], "train_tokens": study["base"]["batch_tokens"]}))

        def one_step(n_layers: int) -> list[str]:
            out = tempfile.mkdtemp(dir=temporary)
            return ["train", str(run_file), "--set", f"n_layers={n_layers}", "--out", out, "--threads", "1"]

        tiny = [str(HERE / "sparsedepth/examples/quickstart.yaml"), "--scale", "tiny", "--device", "cpu"]
        once = ["--vary", "n_layers=2", "--seeds", "1", "--set", "measures=[loss]", "--device", "cpu"]
        finished = tempfile.mkdtemp(dir=temporary)
        if given.only in (again := "a finished sweep again"):
            seconds(HERE, ["sweep", *tiny, "--out", finished])

        def one_run() -> list[str]:
            out = tempfile.mkdtemp(dir=temporary)
            return ["sweep", "--base", str(run_file), *once, "--out", out]

        commands: dict[str, Callable[[], Sequence[str]]] = {
            "SELECT, a large pack": lambda: ("query", STUDY, SELECT),
            "SELECT, a pack of 27 runs": lambda: ("query", QUICKSTART, SELECT),
            "best": lambda: ("best", STUDY),
            "status": lambda: ("status", STUDY),
            again: lambda: ("sweep", *tiny, "--out", finished),
            "a sweep of one step": one_run,
            "train one step and measure, 12 layers": lambda: one_step(12),
            "train one step and measure, 32 layers": lambda: one_step(32),
        }
        for name, words in commands.items():
            if given.only not in name:
                continue
            measured = defaultdict(list)
            for repeat in range(given.repeats + 1):
                for side in sides if repeat % 2 else reversed(sides):
                    measured[side].append(seconds(side, words()))
            for side in sides:
                print(
                    f"{name:37} {described(measured[side][1:])}  {side.name}", flush=True
                )  # the first may have compiled


if __name__ == "__main__":
    main()
