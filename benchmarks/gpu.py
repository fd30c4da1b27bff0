"""What to run first on a machine with a GPU and no network: `make gpu`, or one piece of it.

    python benchmarks/gpu.py all --out build/gpu         # the five pieces, then the table
    python benchmarks/gpu.py training --out build/gpu    # one independent piece, at most 9 minutes
    python benchmarks/gpu.py table --out build/gpu       # gpu.json and gpu.md of the pieces run so far
    python benchmarks/gpu.py all --dry --out build/gpu   # the same on a CPU at tiny sizes, some minutes

A piece is a list of steps, each a command with a limit in seconds. If a step fails, hangs or has no time left, the
others still run, and its row in the table says so. Its output is in OUT/PIECE-STEP.txt; numbers that it writes as lines
of JSON to the file $ROWS are in gpu.json. No setting of the GPU is changed.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PIECE_SECONDS = 540
"""Most seconds for all steps of a piece."""

SPARSEDEPTH = "-m sparsedepth.cli.main"
SWEEP = f"{SPARSEDEPTH} sweep sweeps/search.yaml --workers 6 --scale micro --out {{out}}/sweep"
DRY_SWEEP = f"{SPARSEDEPTH} sweep sweeps/quickstart.yaml --workers 1 --scale tiny --out {{out}}/sweep"
DRY_KERNELS = "benchmarks/kernels.py --quick --repeats 1 --calls 1"


@dataclass(frozen=True)
class Step:
    """One command: arguments of Python, with {out} and {rows} filled in."""

    name: str
    seconds: int
    command: str
    dry: str
    """The command at tiny sizes on a CPU."""
    killed_after: int | None = None
    """Seconds after which the command and its children get kill -9, which is not a failure."""


def _train(size: str, seconds: int) -> Step:
    train = "benchmarks/train.py --json {rows} --preset"
    return Step(
        size, seconds, f"{train} gpu-{size} --repeats 6 --top 12", f"{train} quick --repeats 2 --no-compile --top 3"
    )


PIECES: dict[str, list[Step]] = {
    "machine": [
        Step("doctor", 60, f"{SPARSEDEPTH} doctor", dry=f"{SPARSEDEPTH} doctor"),
        Step(
            "tests",
            240,
            "-m pytest tests/test_gpu.py -m gpu -q -rfE -n 4 --timeout 200",
            dry="-m pytest tests/test_gpu.py -m gpu -q --collect-only",
        ),
        Step("kernels", 110, "benchmarks/kernels.py --threads 4", dry=DRY_KERNELS),
        Step(
            "kernels_large",
            110,
            "benchmarks/kernels.py --threads 4 --sequences 4 --length 4096 --width 2048 --heads 16 --kv-heads 4 "
            "--d-expert 1408 --calls 5 --repeats 3",
            dry=DRY_KERNELS,
        ),
    ],
    "training": [_train("1.2b", 250), _train("250m", 110), _train("100m", 100)],
    "experts": [_train("experts", 250)],
    "sweeps": [
        Step("killed", 90, SWEEP, dry=DRY_SWEEP, killed_after=60),
        Step("resumed", 200, SWEEP, dry=DRY_SWEEP),
        Step(
            "runs_per_gpu",
            240,
            "benchmarks/stack.py --device cuda --widths 64 128 --layers 24 --tokens 8192 --seq-len 256 --stacks 4 16 "
            "--processes 4 --repeats 3 --seconds 2 --json {rows}",
            dry="benchmarks/stack.py --widths 16 --layers 2 --tokens 64 --seq-len 8 --stacks 2 --processes 1 "
            "--repeats 2 --seconds 0.05 --json {rows}",
        ),
    ],
    "graph": [
        Step(
            "tests",
            150,
            "-m pytest tests/test_gpu_graph.py -m gpu -q -rfEs -n 4 --timeout 140",
            dry="-m pytest tests/test_gpu_graph.py -m gpu -q --collect-only",
        ),
        Step(
            "rates",
            380,
            "benchmarks/cuda_graph.py --json {rows}",
            dry="benchmarks/cuda_graph.py --recorded --widths 16 --layers 2 --tokens 64 --seq-len 8 --repeats 4 "
            "--json {rows}",
        ),
    ],
    "measures": [
        Step(
            "against_one_pass_each",
            520,
            "benchmarks/measure.py --device cuda --layers 24 --width 2048 --heads 16 --sequences 8 --length 512 "
            "--repeats 2 --threads 4",
            dry="benchmarks/measure.py --layers 2 --width 16 --heads 2 --sequences 2 --length 16 --repeats 1",
        ),
    ],
}


def run_piece(piece: str, out: Path, dry: bool) -> list[dict[str, Any]]:
    """One row per step: how it ended, how long it took, and its numbers."""
    began, results = time.monotonic(), []
    patience = 5 if dry else 1  # a dry run does not test the time
    for step in PIECES[piece]:
        left = patience * PIECE_SECONDS - (time.monotonic() - began)
        print(f"== {piece}: {step.name}", flush=True)
        row = {"end": "left out, no time"}
        if left > 5:
            row = run_step(piece, step, out, dry, min(patience * step.seconds, left))
        results.append({"piece": piece, "step": step.name, **row})
        print(f"== {piece}: {step.name}: {row['end']}", flush=True)
    (out / f"{piece}.json").write_text(json.dumps(results, indent=1))
    return results


def run_step(piece: str, step: Step, out: Path, dry: bool, limit: float) -> dict[str, Any]:
    rows, log = out / f"{piece}-{step.name}.jsonl", out / f"{piece}-{step.name}.txt"
    rows.unlink(missing_ok=True)
    words = (step.dry if dry else step.command).format(out=out, rows=rows).split()
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            code = process.wait(step.killed_after or limit)
            end = f"exit {code}" if code else "ok"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end = f"killed after {step.killed_after or limit:.0f} s"
    numbers = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    return {"end": end, "seconds": round(time.monotonic() - began, 1), "rows": numbers}


def facts() -> dict[str, Any]:
    """Device, versions, commit and date."""
    import torch

    commit = None
    with contextlib.suppress(OSError):  # no git
        git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or None
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")},
    }


def write_table(out: Path) -> None:
    """Write gpu.json and gpu.md of the pieces that have results."""
    files = [file for name in PIECES if (file := out / f"{name}.json").exists()]
    steps = [row for file in files for row in json.loads(file.read_text())]
    about = facts()
    (out / "gpu.json").write_text(json.dumps({**about, "steps": steps}, indent=1))
    (out / "gpu.md").write_text(markdown(about, steps))
    print(f"{out}/gpu.json, {out}/gpu.md: {sum(row['end'] == 'ok' for row in steps)} of {len(steps)} steps ended well")


def markdown(about: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    """One table of the steps, then one of each step's numbers."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [f"{about['device']}, {versions}, CUDA {about['cuda']}, {about['date']}, commit {about['commit']}", ""]
    lines += ["| piece | step | end | seconds |", "|---|---|---|---|"]
    lines += [f"| {row['piece']} | {row['step']} | {row['end']} | {row.get('seconds', '')} |" for row in steps]
    for row in steps:
        if row.get("rows"):
            columns = list(dict.fromkeys(name for numbers in row["rows"] for name in numbers))
            lines += ["", f"{row['piece']}: {row['step']}", ""]
            lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
            lines += [f"| {' | '.join(str(numbers.get(name, '')) for name in columns)} |" for numbers in row["rows"]]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=("all", "table", *PIECES))
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--dry", action="store_true", help="on a CPU, at tiny sizes")
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    for piece in PIECES if given.piece == "all" else [given.piece] if given.piece in PIECES else []:
        if piece == "sweeps":
            shutil.rmtree(given.out / "sweep", ignore_errors=True)
        run_piece(piece, given.out, given.dry)
    write_table(given.out)


if __name__ == "__main__":
    main()
