"""A sweep that trains real decoders in seconds, and ways to run it as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from support import forked_commands
from support.sweep_processes import OF

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.plan.tasks import Plan
from sparsedepth.sweep.results_folder import ResultsIndex

BASE = {
    **{"d_model": 16, "n_heads": 2, "seq_len": 32, "batch_tokens": 128, "train_tokens": 128 * 30, "lr": 3e-3},
    **{"val_tokens": 512, "measure_tokens": 128, "fit_tokens": 256, "observe_every": 10},
    **{"precision": "fp32", "val_fraction": 0.2},
}


def corpus(folder: Path) -> Path:
    """A small local text: 40 documents of counting sentences."""
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for n in range(40):
        words = " ".join(f"{n} times {i} is {n * i}." for i in range(60))
        (text / f"{n:02}.txt").write_text(words)
    return text


CPU = RuntimeConfig(device="cpu", threads=1)


def run_config(folder: Path, **fields) -> RunConfig:
    """A run of ten steps on the small text, of which only the loss is measured; a batch has four sequences."""
    values = {**BASE, "n_layers": 2, "corpus": str(corpus(folder)), "measures": ["loss"], "train_tokens": 1280}
    return build(RunConfig, {**values, **fields}, "test")


def definition(folder: Path, **fields) -> Path:
    """A sweep definition file over the small text: n_layers 2 and 3, two seeds."""
    content = {
        **{"name": "tiny", "question": "Do three layers beat two?", "hypothesis": "Not in thirty steps."},
        "base": {**BASE, "corpus": str(corpus(folder)), **fields.pop("base", {})},
        "space": {"n_layers": [2, 3]},
        "seeds": [0, 1],
        **fields,
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}


def start(*arguments: object) -> subprocess.Popen:
    """The command line, in a process group of its own."""
    command = [sys.executable, "-m", "sparsedepth.cli.main", *map(str, arguments)]
    environment = {**ENVIRONMENT, OF: "\n".join(map(str, arguments))}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def sparsedepth(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Run the command line to its end; its output and its errors. The exit code must be `code`."""
    returned, out, err = forked_commands.call([*map(str, arguments)], ENVIRONMENT)
    assert returned == code, f"exit {returned}\n{out}\n{err}"
    return out, err


def table(results: Path) -> dict[str, dict]:
    """The whole summary of every complete run: what a disturbed sweep must reproduce to the last digit."""
    folders = sorted(path.parent for path in results.glob("runs/*/complete"))
    return {folder.name: json.loads((folder / "summary.json").read_text()) for folder in folders}


def known_runs(plan: Plan, results: Path) -> list[RunConfig]:
    """The runs of a plan that are known so far, given those that have finished in the folder."""
    return [*plan.configs(ResultsIndex(results, plan.definition).loss_of).values()]
