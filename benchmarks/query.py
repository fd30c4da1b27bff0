"""How long do questions to a large store take? 2,016 runs of 12 to 32 layers, made up, in a temporary folder.

    python benchmarks/query.py [--runs 2016]

Prints seconds of processor time, which a busy machine changes least: of opening a store, of every saved question and of
`best` inside Python (store open, pandas imported), and of whole commands (with their wall time), with exit status 1
where a limit is exceeded.
"""

import argparse
import itertools
import math
import random
import resource
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

INSIDE, WHOLE, STATUS = 0.5, 1.5, 1.0
FIRST, ONE_MORE = 5.0 / 5000, 0.2
"""Of opening: seconds per run for the first time, and for one run that is not in the cache."""
DEFINITION = """
name: benchmark
question: How long?
hypothesis: Not long.
space: {n_layers: [12, 16, 24, 32], weight_decay: [0.0, 0.1, 0.3, 1.0], n_kv_heads: [4, 2, 1], depth_scale: [none, lns]}
tune: {lr: [5.0e-4, 1.0e-3, 2.0e-3]}
seeds: [0, 1, 2, 3, 4, 5, 6]
"""
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
    """Processor time of this process, the least of a few."""
    return min(_measured(work, resource.RUSAGE_SELF)[0] for _ in range(times))


def _measured(work: Callable[[], object], who: int) -> tuple[float, float]:
    """Processor time (user and system) and wall time."""
    before, began = resource.getrusage(who), time.perf_counter()
    work()
    after, ended = resource.getrusage(who), time.perf_counter()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended - began


def command(*words: str) -> tuple[float, float]:
    """Processor and wall time of a command, the least of a few."""
    whole = [sys.executable, "-m", "sparsedepth.cli.main", *words]

    def run() -> object:
        return subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)

    cpu, wall = zip(*(_measured(run, resource.RUSAGE_CHILDREN) for _ in range(3)), strict=True)
    return min(cpu), min(wall)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2016)
    n_runs = parser.parse_args().runs
    exceeded = []

    def report(name: str, cpu: float, limit: float, wall: float | None = None) -> None:
        if cpu > limit:
            exceeded.append(name)
        print(f"{name:28} {cpu:7.3f} s of {limit:.1f}" + (f"   wall {wall:.2f} s" if wall else ""), flush=True)

    def report_command(name: str, limit: float, *words: str) -> None:
        cpu, wall = command(*words)
        report(name, cpu, limit, wall)

    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        with mock.patch("os.fsync"):  # thousands of folders' worth of waiting for the disk
            fill(results, n_runs)
            (results / "sweep.yaml").write_text(DEFINITION)
            report(f"{n_runs} runs for the first time", seconds(lambda: open_store(folder).close(), 1), FIRST * n_runs)
            again = seconds(lambda: open_store(folder).close())
            report("again", again, INSIDE)
            make_run(results, RunConfig(n_layers=6), {"val_loss": 3.0})
            report("with one more, in addition", seconds(lambda: open_store(folder).close()) - again, ONE_MORE)
        report_command("status", STATUS, "status", folder)
        with open_store(folder) as store:
            for name in questions.QUESTIONS:
                report(f"{name}, inside", seconds(lambda name=name: questions.ask(store, name)), INSIDE)
                report_command(name, WHOLE, "query", folder, "--ask", name)
            effects = seconds(lambda: effects_table(measure_effects(store.frame("select * from runs"))))
            report("effects, inside", effects, INSIDE)
            report_command("effects", WHOLE, "query", folder, "--ask", "effects")
            where = "params_active < 5e7"
            report("best, inside", seconds(lambda: best(store, "usefulness", 32, where=where)), INSIDE)
            report_command("best", WHOLE, "best", folder, "--by", "usefulness", "--depth", "32", "--where", where)
        report_command("SQL, in the sandbox", WHOLE, "query", folder, "select count(*) from runs")
        report_command("SQL on layers", WHOLE, "query", folder, "select avg(value) from layers")
    if exceeded:
        print(f"beyond the limit: {', '.join(exceeded)}")
    return int(bool(exceeded))


if __name__ == "__main__":
    sys.exit(main())
