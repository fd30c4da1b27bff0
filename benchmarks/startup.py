"""How long do short commands take? With --against, compared with another checkout of the library, in turn.

    python benchmarks/startup.py [--against CHECKOUT] [--repeats 9] [--only "measure"]

Prints median and quartiles of processor time in seconds, which other load affects least: of the process and its child
together, and in sequence (the process until its child has started, then the child), which is the waiting time on an
idle machine with two cores. 'train one step and measure' is start-up and measures of a run of the depth study.
"""

import argparse
import json
import os
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
INSIDE = """
import json, os, resource, subprocess, sys, time
from sparsedepth.cli import main
started, start = [], subprocess.Popen.__init__
def noted(*given, **named):
    start(*given, **named)
    started.append(time.process_time())
subprocess.Popen.__init__ = noted
sys.stdout = open(os.devnull, "w")
try:
    main.run(sys.argv[1:])
except SystemExit as end:
    assert not end.code
child, own = resource.getrusage(resource.RUSAGE_CHILDREN), time.process_time()
of_child = child.ru_utime + child.ru_stime
print(json.dumps([own + of_child, (started or [own])[0] + of_child]), file=sys.stderr)
"""


def seconds(checkout: Path, words: Sequence[str]) -> list[float]:
    """Processor time of a command: in total, and in sequence."""
    command = [sys.executable, "-c", INSIDE, *words]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=checkout)
    return json.loads(done.stderr.splitlines()[-1])


def described(values: Sequence[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="the commands whose names contain this")
    given = parser.parse_args()
    sides = [*filter(None, (given.against, HERE))]
    with tempfile.TemporaryDirectory() as temporary:
        run_file = Path(temporary) / "run.yaml"
        study = yaml.safe_load((HERE / "sweeps/depth_study.yaml").read_text())
        run_file.write_text(yaml.safe_dump({**study["base"], "train_tokens": study["base"]["batch_tokens"]}))

        def one_step(n_layers: int) -> list[str]:
            out = tempfile.mkdtemp(dir=temporary)
            return ["train", str(run_file), "--set", f"n_layers={n_layers}", "--out", out, "--threads", "1"]

        commands: dict[str, Callable[[], Sequence[str]]] = {
            "SELECT, a large pack": lambda: ("query", STUDY, SELECT),
            "SELECT, a pack of 27 runs": lambda: ("query", QUICKSTART, SELECT),
            "best": lambda: ("best", STUDY),
            "status": lambda: ("status", STUDY),
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
                whole, in_sequence = zip(*measured[side][1:], strict=True)  # the first may have compiled
                print(f"{name:37} {described(whole)}, in sequence {described(in_sequence)}  {side.name}", flush=True)


if __name__ == "__main__":
    main()
