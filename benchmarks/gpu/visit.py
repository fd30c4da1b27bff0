"""Two visits to a machine with one GPU, and no network: does everything work there, and how fast is it?

    python benchmarks/gpu/visit.py a --out build/gpu           # at most 350 s: what no card has seen, then rates
    python benchmarks/gpu/visit.py b --out build/gpu           # at most 350 s: known tests, 200 s of a study, rates
    python benchmarks/gpu/visit.py a b --dry --out build/gpu-dry       # a rehearsal on a CPU, at tiny sizes

A visit is a list of steps, the most valuable first; each is a command with a limit in seconds. If a step fails or
hangs, the others still run; those without time are left out. `make gpu-a` and `make gpu-b` are one visit each, a call
of its own; `make gpu-dry` rehearses both, with the stand-ins of `tests/support/card.py`, and ends in a table of what
was rehearsed and what only a card can show. Each output is a file in OUT, and complete up to the last variant or test
at any time:

    a.log  a.steps.jsonl  a.unseen.txt  a.many.jsonl  a.train.jsonl  a.sweep.tgz  a.facts.json  a.claims.txt
    b.log  b.steps.jsonl  b.tests.txt  b.study.tgz  b.table.txt  b.train.jsonl  b.claims.txt

The claims are what README may say, with the commit. The study continues in OUT/study, or from OUT/b.study.tgz where
that folder is missing: each visit adds seeds. No setting of the GPU is changed.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
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
    only: str
    """what only a card can show"""
    claim: str
    """what may be said of a card where the step has ended well"""
    output: str | None = None
    """the file that also holds the command's output"""
    grace: int = 5
    """seconds between SIGTERM at the limit, which stops runs at a checkpoint, and SIGKILL"""


def rates(name: str, seconds: int, size: str, variants: str, file: str) -> Step:
    command = f"{{here}}/train_rates.py {size} {variants} {{out}}/{file}"
    return Step(
        name=name,
        seconds=seconds,
        command=f"{command} --device cuda",
        dry=f"{command} --device cpu",
        only="milliseconds, utilisation and memory",
        claim=f"rates of {variants} at {size}: {file}",
    )


def tests(name: str, seconds: int, files: str, output: str, claim: str) -> Step:
    """In a rehearsal with stand-ins: the files name what they leave out there."""
    command = f"-m pytest {files} -m gpu -p no:cacheprovider -v -rfEs"
    return Step(
        name=name,
        seconds=seconds,
        command=f"{command} -n 8 --timeout {seconds - 10}",
        dry=f"{command} --timeout 300",
        only="CUDA's kernels, its compiler and its graphs; NCCL",
        claim=claim,
        output=output,
    )


STACK = "benchmarks/stack.py --json {out}/a.many.jsonl --repeats 2"
A = [
    tests(
        "unseen",
        120,
        "tests/test_gpu_unseen.py",
        "a.unseen.txt",
        "compiled variants, stacks of experts and as one graph, Muon, chunked head, export, NCCL, kill and resume",
    ),
    Step(
        name="many",
        seconds=50,
        command=f"{STACK} --device cuda --widths 128 --layers 24 --tokens 8192 --seq-len 256 --stacks 8 --processes 2 "
        "--seconds 1.5",
        dry=f"{STACK} --widths 16 --layers 2 --tokens 64 --seq-len 8 --stacks 2 --processes 1 --seconds 0.05",
        only="which stack and how many workers pay",
        claim="many small runs, stacked and side by side: a.many.jsonl",
    ),
    rates("train-250m", 60, "250m", "ours-compiled,plain-compiled", "a.train.jsonl"),
    Step(
        name="sweep",
        seconds=80,
        command="{here}/kill_resume.py {out} --workers 2",
        dry="{here}/kill_resume.py {out} --workers 1 --scale tiny",
        only="that no process keeps the card's memory after kill -9",
        claim="a sweep survives kill -9, and repeats no complete run",
    ),
    Step(
        name="facts",
        seconds=40,
        command="{here}/facts.py {out}/a.facts.json --device cuda",
        dry="{here}/facts.py {out}/a.facts.json --device cpu",
        only="a fork that uses CUDA, waits, rates of products",
        claim="facts of the machine: a.facts.json",
    ),
]

STUDY = f"{SPARSEDEPTH} sweep {{here}}/../../sparsedepth/examples/gpu_text.yaml --out {{out}}/study"
TABLE = f"{SPARSEDEPTH} query {{out}}/study {shlex.quote(SELECT)}"
B = [
    tests(
        "tests", 80, "tests/test_gpu.py tests/test_gpu_graph.py", "b.tests.txt", "the tests of kernels, runs, graphs"
    ),
    Step(
        name="study",
        seconds=200,
        command=f"{STUDY} --workers 2",
        dry=f"{STUDY} --workers 1 --scale tiny",
        only="how many seeds 200 s add",
        claim="seeds of gpu_text: b.study.tgz, b.table.txt",
        grace=20,
    ),
    Step(
        name="table", seconds=10, command=TABLE, dry=TABLE, only="its numbers", claim="", output="b.table.txt", grace=1
    ),
    rates("train-1.2b", 45, "1.2b", "ours-compiled,plain-compiled", "b.train.jsonl"),
    Step(
        name="doctor",
        seconds=15,
        command=f"{SPARSEDEPTH} doctor",
        dry=f"{SPARSEDEPTH} doctor",
        only="which kernels run there",
        claim="",
    ),
]


@dataclass(frozen=True)
class Visit:
    seconds: int
    steps: list[Step] = field(default_factory=list)


VISITS = {"a": Visit(350, A), "b": Visit(350, B)}
DRY_PATIENCE = 15
"""A dry run tests the steps, not the time."""


def environment(dry: bool) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"GPU_TESTS_ON": "cpu"} if dry else {}),
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
            env=environment(dry),
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


def run_visit(name: str, visit: Visit, out: Path, *, dry: bool) -> list[dict]:
    """One row for each step, and what may be claimed, written as soon as it ends: a call that is cut loses nothing."""
    began, rows = time.monotonic(), []
    patience = DRY_PATIENCE if dry else 1
    log, steps, claims = (out / f"{name}.{kind}" for kind in ("log", "steps.jsonl", "claims.txt"))
    log.write_text("")
    steps.write_text("")
    claims.write_text(f"at {commit()}{', in a rehearsal on a CPU: nothing' * dry}\n")
    for step in visit.steps:
        at = time.monotonic() - began
        limit = min(step.seconds * patience, visit.seconds * patience - at)
        row = {"step": step.name, "end": "left out, no time", "seconds": None, "at": round(at), "commit": commit()}
        if limit >= LEAST_SECONDS:
            print(f"== {name}, {step.name}: at most {limit:.0f} s, at {at:.0f} s", flush=True)
            code = run_step(step, limit, out, log, dry)
            row["end"] = f"ended after {limit:.0f} s" if code is None else f"exit {code}" if code else "ok"
            row["seconds"] = round(time.monotonic() - began - at)
        print(f"== {name}, {step.name}: {row['end']}", flush=True)
        rows.append(row)
        with steps.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if row["end"] == "ok" and step.claim and not dry:
            with claims.open("a") as file:
                file.write(f"{step.claim}\n")
        pack_study(out)
    return rows


@functools.cache
def commit() -> str:
    """The commit, with + if files differ from it; COMMIT where there is no git."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "an unknown commit")


def rehearsal_table(rows: dict[str, list[dict]], out: Path) -> Iterator[str]:
    """Of each step what was rehearsed, and what only a card can show."""
    yield "| step | rehearsed | only on a card |"
    yield "|---|---|---|"
    for name, ended in rows.items():
        for step, row in zip(VISITS[name].steps, ended, strict=True):
            said = (out / step.output).read_text() if step.output and (out / step.output).exists() else ""
            passed = re.findall(r"(\d+) passed", said)
            left_out = re.findall(r"SKIPPED \[(\d+)\] \S+ only on a card: (.*)", said)
            rehearsed = f"{passed[-1]} tests" if passed else row["end"]
            only = [step.only, *(f"{n} x {why}" for n, why in left_out)]
            yield f"| {name}, {step.name} | {rehearsed} | {'; '.join(only)} |"


def unpack_study(out: Path) -> None:
    packed = out / "b.study.tgz"
    if packed.exists() and not (out / "study").exists():
        with tarfile.open(packed) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since 3.11.4
            archive.extractall(out / "study")


def pack_study(out: Path) -> None:
    """Records without weights, which suffice to continue."""
    if (out / "study").exists():
        pack(out / "study", out / "b.study.tgz")


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
    parser.add_argument("--dry", action="store_true", help="a rehearsal: on a CPU, at tiny sizes, with stand-ins")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name in given.visits:
        unpack_study(out)
        rows[name] = run_visit(name, VISITS[name], out, dry=given.dry)
        print(f"== README may claim: {(out / f'{name}.claims.txt').read_text()}", flush=True)
    if given.dry:
        print(*rehearsal_table(rows, out), sep="\n")
    every = [row for ended in rows.values() for row in ended]
    failed = [row["step"] for row in every if row["end"] != "ok"]
    print(f"{out}: {len(every) - len(failed)} of {len(every)} steps ended well", *failed, sep="\n  ")
    sys.exit(bool(failed) and given.dry)


if __name__ == "__main__":
    main()
