"""Two visits to a machine with one GPU, and no network: does everything work there, and how fast is it?

    python benchmarks/gpu/visit.py first --out build/gpu           # at most 530 s: facts, tests, a killed sweep, rates
    python benchmarks/gpu/visit.py second --out build/gpu          # at most 240 s: a study, continued by later visits
    python benchmarks/gpu/visit.py second --out build/gpu --seconds 520
    python benchmarks/gpu/visit.py first second --dry --out build/gpu-dry       # on a CPU, at tiny sizes

A visit is a list of steps, the most valuable first; each is a command with a limit in seconds. If a step fails or
hangs, the others still run; those without time are left out. `make gpu` is both visits, `make gpu-dry` both on a CPU.
Each output is a file in OUT, and complete up to the last variant at any time:

    first.log  first.steps.jsonl  first.facts.json  first.tests.txt  first.train.jsonl  first.many.jsonl
    first.sweep.tgz  second.log  second.steps.jsonl  second.study.tgz  second.table.txt

The study continues in OUT/study, or from OUT/second.study.tgz where that folder is missing. No setting of the GPU is
changed.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SPARSEDEPTH = "-m sparsedepth.cli.main"
SELECT = (
    "select n_layers, depth_scale, n_kv_heads, n_experts, weight_decay, lr, count(*) as runs, "
    "round(avg(val_loss), 4) as loss, round(avg(needed_layers), 1) as needed, "
    "round(avg(residual_variance_last), 2) as variance, round(avg(training_seconds), 1) as seconds "
    "from runs group by all order by all"
)
LEAST_SECONDS = 10
"""A step with less time left is left out."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command: arguments of Python, with {out} and {here} filled in."""

    name: str
    seconds: int
    command: str
    dry: str
    """the command on a CPU, at tiny sizes"""
    output: str | None = None
    """the file that also holds the command's output"""
    grace: int = 5
    """seconds between SIGTERM at the limit, which stops runs at a checkpoint, and SIGKILL"""


def rates(name: str, seconds: int, size: str, variants: str) -> Step:
    command = f"{{here}}/train_rates.py {size} {variants} {{out}}/first.train.jsonl"
    return Step(name=name, seconds=seconds, command=f"{command} --device cuda", dry=f"{command} --device cpu")


TESTS = "-m pytest tests/test_gpu.py tests/test_gpu_graph.py -m gpu -p no:cacheprovider"
STACK = "benchmarks/stack.py --json {out}/first.many.jsonl --repeats 2"
FIRST = [
    Step(
        name="facts",
        seconds=50,
        command="{here}/facts.py {out}/first.facts.json --device cuda",
        dry="{here}/facts.py {out}/first.facts.json --device cpu",
    ),
    Step(
        name="tests",
        seconds=150,
        command=f"{TESTS} -v -rfEs -n 8 --timeout 140",
        dry=f"{TESTS} -q --collect-only",
        output="first.tests.txt",
    ),
    Step(
        name="sweep",
        seconds=130,
        command="{here}/kill_resume.py {out} --workers 6",
        dry="{here}/kill_resume.py {out} --workers 1 --scale tiny",
    ),
    rates("train-250m", 80, "250m", "ours-compiled,plain-compiled,ours-eager"),
    rates("train-1.2b", 80, "1.2b", "ours-compiled,plain-compiled"),
    rates("small-graph", 60, "small", "ours-eager,ours-graph,ours-compiled,ours-compiled-graph"),
    Step(
        name="small-many",
        seconds=60,
        command=f"{STACK} --device cuda --widths 128 --layers 24 --tokens 8192 --seq-len 256 --stacks 8 --processes 6 "
        "--seconds 1.5",
        dry=f"{STACK} --widths 16 --layers 2 --tokens 64 --seq-len 8 --stacks 2 --processes 1 --seconds 0.05",
    ),
    rates("train-experts", 60, "experts", "ours-compiled"),
    Step(name="doctor", seconds=40, command=f"{SPARSEDEPTH} doctor", dry=f"{SPARSEDEPTH} doctor"),
]

STUDY = f"{SPARSEDEPTH} sweep {{here}}/../../sparsedepth/examples/gpu_text.yaml --out {{out}}/study"
TABLE = f"{SPARSEDEPTH} query {{out}}/study {shlex.quote(SELECT)}"
SECOND = [
    Step(
        name="study",
        seconds=195,
        command=f"{STUDY} --workers 6 --runtime cuda_graph=auto",
        dry=f"{STUDY} --workers 1 --scale tiny",
        grace=20,
    ),
    Step(name="table", seconds=25, command=TABLE, dry=TABLE, output="second.table.txt"),
]


@dataclass(frozen=True)
class Visit:
    seconds: int
    steps: list[Step] = field(default_factory=list)
    reserved: int = 0
    """seconds for the steps after the first, which takes all other time of a longer visit"""


VISITS = {"first": Visit(530, FIRST), "second": Visit(240, SECOND, reserved=25)}
DRY_PATIENCE = 3
"""A dry run tests the steps, not the time."""


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_step(step: Step, limit: float, out: Path, log: Path, dry: bool) -> int | None:
    """The exit code; None if the step was ended at its limit."""
    command = (step.dry if dry else step.command).format(out=out, here=HERE)
    target = out / step.output if step.output else log
    with target.open("w" if step.output else "a") as file:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(command)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        try:
            return process.wait(limit - step.grace)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.terminate()
                process.wait(step.grace)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def run_visit(name: str, visit: Visit, out: Path, *, dry: bool, seconds: float | None = None) -> list[dict]:
    """One row for each step, written as soon as it ends."""
    began, rows = time.monotonic(), []
    deadline = seconds or visit.seconds * (DRY_PATIENCE if dry else 1)
    log, steps = out / f"{name}.log", out / f"{name}.steps.jsonl"
    log.write_text("")
    steps.write_text("")
    for number, step in enumerate(visit.steps):
        at = time.monotonic() - began
        limit = deadline - at if not number and visit.reserved else step.seconds * (DRY_PATIENCE if dry else 1)
        limit = min(limit, deadline - at - (0 if number else visit.reserved))
        row = {"step": step.name, "end": "left out, no time", "seconds": None, "at": round(at)}
        if limit >= LEAST_SECONDS:
            print(f"== {name}, {step.name}: at most {limit:.0f} s, at {at:.0f} s", flush=True)
            code = run_step(step, limit, out, log, dry)
            row["end"] = f"ended after {limit:.0f} s" if code is None else f"exit {code}" if code else "ok"
            row["seconds"] = round(time.monotonic() - began - at)
        print(f"== {name}, {step.name}: {row['end']}", flush=True)
        rows.append(row)
        with steps.open("a") as file:
            file.write(json.dumps(row) + "\n")
        pack_study(out)
    return rows


def unpack_study(out: Path) -> None:
    packed = out / "second.study.tgz"
    if packed.exists() and not (out / "study").exists():
        with tarfile.open(packed) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since 3.11.4
            archive.extractall(out / "study")


def pack_study(out: Path) -> None:
    """Records without weights, which suffice to continue."""
    if (out / "study").exists():
        pack(out / "study", out / "second.study.tgz")


def pack(results: Path, target: Path) -> None:
    """A results folder without weights, text and unfinished runs."""

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        left_out = entry.name.endswith(".safetensors") or entry.name.split("/")[1:2] in (["data"], ["work"])
        return None if left_out else entry

    with tarfile.open(target, "w:gz") as archive:
        archive.add(results, ".", filter=kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("visits", nargs="+", choices=VISITS)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--seconds", type=float, help="of the visit, in place of its own")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at tiny sizes")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in given.visits:
        unpack_study(out)
        rows += run_visit(name, VISITS[name], out, dry=given.dry, seconds=given.seconds)
    failed = [row["step"] for row in rows if row["end"] != "ok"]
    print(f"{out}: {len(rows) - len(failed)} of {len(rows)} steps ended well", *failed, sep="\n  ")
    sys.exit(bool(failed) and given.dry)


if __name__ == "__main__":
    main()
