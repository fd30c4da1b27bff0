"""How long do questions to a large store take? 2,016 runs of 12 to 32 layers, made up, in a temporary folder.

    python benchmarks/query.py [--runs 2016]

Prints, for every saved question and for `best`, the seconds inside Python (store open, pandas imported) and of the
whole command, with exit status 1 where 0.5 s or 1.5 s is exceeded; and what the fence costs.
"""

import argparse
import itertools
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from synthetic import make_run

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.family import effects_table, measure_effects
from sparsedepth.store import questions
from sparsedepth.store.best import best
from sparsedepth.store.connection import open_store

INSIDE, WHOLE = 0.5, 1.5
METRICS = ("residual_variance", "weight_sparsity@0.001", "attention_sparsity@0.001", "causal_effect")
MEASURED = ("usefulness", "usefulness_loss_increase", "weight_sparsity", "attention_sparsity_rel", "causal_score")


def fill(results: Path, n_runs: int) -> None:
    """Runs over six axes, with every table a sweep leaves."""
    draw = random.Random(0)
    axes = itertools.product(
        range(7), (12, 16, 24, 32), (0.0, 0.1, 0.3, 1.0), (4, 2, 1), ("none", "lns"), (5e-4, 1e-3, 2e-3)
    )
    for seed, depth, decay, heads, scale, lr in itertools.islice(axes, n_runs):
        fields = {"n_layers": depth, "weight_decay": decay, "n_kv_heads": heads, "depth_scale": scale}
        config = build(RunConfig, {**fields, "lr": lr, "seed": seed}, "benchmark")
        sizes = dict.fromkeys(("params_total", "params_active"), 1000 * depth) | {"train_flops": 1e9 * depth}
        summary = {"val_loss": 3 - 0.1 * math.log(depth) + draw.gauss(0, 0.01), "tokens_trained": config.train_tokens}
        summary |= {name: draw.random() for name in MEASURED} | {"residual_variance_last": 1 + 100 * draw.random()}
        if draw.random() < 0.02:
            summary = {"outcome": "diverged", "diverged_step": 10, "diverged_cause": "loss is NaN"}
        layers = [
            {"step": 256, "layer": layer, "metric": metric, "value": draw.random(), "n": 8192}
            for layer in range(1, depth + 1)
            for metric in METRICS
        ]
        curves = [{"step": step, "tokens": step * 8192, "train_loss": 3.0, "lr": lr} for step in range(0, 256, 10)]
        make_run(results, config, {**summary, **sizes}, layers=layers, curves=curves)


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """The fastest of a few."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def command(*words: str) -> Callable[[], object]:
    whole = [sys.executable, "-m", "sparsedepth.cli.main", *words]
    return lambda: subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2016)
    n_runs = parser.parse_args().runs
    exceeded = False

    def told(name: str, inside: float | None, whole: float) -> None:
        nonlocal exceeded
        exceeded |= whole > WHOLE or (inside or 0) > INSIDE
        print(f"{name:16}  {'-' if inside is None else f'{inside:.3f}':>7} s  {whole:6.2f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        with mock.patch("os.fsync"):  # thousands of folders' worth of waiting for the disk
            fill(Path(folder), n_runs)
        first = seconds(lambda: open_store(folder).close(), times=1)
        print(f"{n_runs} runs: opened for the first time in {first:.1f} s, then in ", end="")
        print(f"{seconds(lambda: open_store(folder).close()):.2f} s\nquestion           inside     whole", flush=True)
        with open_store(folder) as store:
            for name in questions.QUESTIONS:
                inside = seconds(lambda name=name: questions.ask(store, name))
                told(name, inside, seconds(command("query", folder, "--ask", name)))
            effects = seconds(lambda: effects_table(measure_effects(store.frame("select * from runs"))))
            told("effects", effects, seconds(command("query", folder, "--ask", "effects")))
            where = "params_active < 5e7"
            inside = seconds(lambda: best(store, "usefulness", 32, where=where))
            words = ("best", folder, "--by", "usefulness", "--depth", "32", "--where", where)
            told("best", inside, seconds(command(*words)))
        whole = seconds(command("query", folder, "select count(*) from runs"))
        told("SQL, fenced", None, whole)
        told("SQL on layers", None, seconds(command("query", folder, "select avg(value) from layers")))
        print(f"the fence costs {whole - seconds(command('query', folder, '--ask', 'diverged')):+.2f} s")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
