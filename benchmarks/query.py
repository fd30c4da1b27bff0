"""How long do queries of a large store take? 5,000 runs of 4 to 24 layers in a temporary folder: the tables and
summaries of the quickstart's runs, with other configurations and, where queries compare them, other numbers.

    python benchmarks/query.py [--runs 5000] [--opening] [--folder DIR]

Prints processor time in seconds, which other load affects least: of opening a store and its first query of the tables
(with --opening, only these), of every saved question and of `best` inside Python (store open, pandas imported), and of
whole commands (with their wall time). The exit status is 1 if a limit is exceeded. A missing --folder is filled and
kept; an existing one is used unchanged.
"""

import argparse
import itertools
import math
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from sparsedepth.config.load import build, yaml_text
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import effects_frame
from sparsedepth.files import MARKER, json_text
from sparsedepth.quantities import IN_RUNS
from sparsedepth.store import saved_queries
from sparsedepth.store.best import best
from sparsedepth.store.checksums import checksum_of, new_marker
from sparsedepth.store.connection import open_store
from sparsedepth.store.packs import open_pack
from sparsedepth.store.parquet import table_bytes
from sparsedepth.store.run_record import parse_record, run_folder

INSIDE, WHOLE, STATUS, TABLES, AGAIN = 0.5, 1.5, 1.0, 5e-3, 1.0
FIRST, ONE_MORE = 5.0 / 5000, 0.2
"""Limits of opening: seconds per run for the first time, and seconds with one run that is not in the cache. TABLES:
seconds per run of the first query of a table. AGAIN: with all runs in the cache."""
REAL = Path(__file__).parent.parent / "results" / "quickstart"
DEPTHS, LRS = (4, 12, 24), (5e-4, 1e-3, 2e-3)
AXES = {"weight_decay": (0.0, 0.1, 0.3, 1.0), "n_kv_heads": (4, 2, 1), "depth_scale": ("none", "lns")}
DEFINITION = {
    "name": "benchmark",
    "question": "How long?",
    "hypothesis": "Not long.",
    "space": {"n_layers": [*DEPTHS], **{name: [*values] for name, values in AXES.items()}},
    "tune": {"lr": [*LRS]},
}
DRAWN = ("usefulness", "usefulness_loss_increase", "weight_sparsity", "attention_sparsity_rel", "causal_score")


def fill(results: Path, n_runs: int) -> None:
    """Complete runs over six axes, with every file of a real run of that depth except the weights."""
    draw = random.Random(0)
    seeds = range(-(-n_runs // math.prod(map(len, (DEPTHS, LRS, *AXES.values())))))
    (results / "sweep.yaml").write_text(yaml.safe_dump({**DEFINITION, "seeds": [*seeds]}))
    real = real_runs()
    cells = []
    for depth, *values in itertools.product(DEPTHS, LRS, *AXES.values()):
        cell = build(RunConfig, {"n_layers": depth, **dict(zip(("lr", *AXES), values, strict=True))}, "benchmark")
        cells.append((cell, yaml_text(cell.model_dump(mode="json"))))
    for seed, (cell, text) in itertools.islice(itertools.product(seeds, cells), n_runs):
        config = cell.model_copy(update={"seed": seed})
        summary, files = draw.choice(real[cell.n_layers])
        write_run(results, config, text.replace("seed: 0", f"seed: {seed}"), drawn(summary, config, draw), files)


def real_runs() -> dict[int, list[tuple[dict[str, Any], dict[str, bytes]]]]:
    """Summary and other files of the runs of REAL, by depth, as today's runs have them: with means and profiles over
    depth, without quantities that left since."""
    real: dict[int, list[tuple[dict[str, Any], dict[str, bytes]]]] = {}
    packed = open_pack(REAL)
    rows = {row["run_id"]: row for row in packed.runs.to_pylist()}
    for record in (parse_record(run.files()) for run in packed.stored_runs):
        if isinstance(record.subject, RunConfig) and record.config.n_layers in DEPTHS:
            summary = {name: value for name, value in rows[record.run_id].items() if name in IN_RUNS}
            files = {f"{table}.parquet": table_bytes(rows) for table, rows in record.tables.items() if len(rows)}
            files["manifest.json"] = json_text(record.manifest).encode()
            real.setdefault(record.config.n_layers, []).append((summary, files))
    return real


def drawn(summary: dict[str, Any], config: RunConfig, draw: random.Random) -> dict[str, Any]:
    """The summary with other numbers where queries compare them."""
    if draw.random() < 0.02:
        return {"outcome": "diverged", "diverged_step": 10, "diverged_cause": "loss is NaN"}
    loss = 3 - 0.1 * math.log(config.n_layers) + draw.gauss(0, 0.01)
    return {
        **summary,
        **{name: draw.random() for name in DRAWN},
        "val_loss": loss,
        "tokens_trained": config.train_tokens,
    }


def write_run(results: Path, config: RunConfig, text: str, summary: dict[str, Any], files: dict[str, bytes]) -> None:
    """A complete run folder, renamed to its place."""
    contents = {"config.yaml": text.encode(), "summary.json": json_text(summary).encode(), **files}
    marker = new_marker(config.run_id, {name: checksum_of(content) for name, content in contents.items()})
    folder = run_folder(results, config.run_id)
    aside = folder.with_name(f".{config.run_id}")
    aside.mkdir(parents=True)
    for name, content in {**contents, MARKER: marker.content}.items():
        (aside / name).write_bytes(content)
    aside.rename(folder)


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """Processor time of this process, the lowest of a few."""
    return min(_measured(work, resource.RUSAGE_SELF)[0] for _ in range(times))


def _measured(work: Callable[[], object], who: int) -> tuple[float, float]:
    """Processor time (user and system) and wall time."""
    before, began = resource.getrusage(who), time.perf_counter()
    work()
    after, ended = resource.getrusage(who), time.perf_counter()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended - began


def command(*words: str) -> tuple[float, float]:
    """Processor and wall time of a command, the lowest of a few."""
    whole = [sys.executable, "-m", "sparsedepth.cli.main", *words]

    def run() -> object:
        return subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)

    cpu, wall = zip(*(_measured(run, resource.RUSAGE_CHILDREN) for _ in range(3)), strict=True)
    return min(cpu), min(wall)


def measure_opening(results: Path, report: Callable[..., None]) -> None:
    """Opening for the first time, again, with one more run, and with a query of a table."""
    shutil.rmtree(results / ".cache", ignore_errors=True)
    *others, last = sorted((results / "runs").iterdir())
    aside = last.rename(results / last.name)
    first, wall = _measured(lambda: open_store(results).close(), resource.RUSAGE_SELF)
    report(f"{len(others):,} runs for the first time", first, FIRST * len(others), wall)
    again = seconds(lambda: open_store(results).close())
    report("again", again, AGAIN)
    aside.rename(last)
    report("with one more, in addition", seconds(lambda: open_store(results).close()) - again, ONE_MORE)
    for name, limit in (("the first question to layers", TABLES * len(others)), ("the next", INSIDE)):
        with open_store(results) as store:
            cpu, wall = _measured(lambda store=store: store.sql("select avg(value) from layers"), resource.RUSAGE_SELF)
            report(name, cpu, limit, wall)
    report("opened with tables", seconds(lambda: open_store(results).close()), AGAIN)


def measure_questions(results: Path, report: Callable[..., None], report_command: Callable[..., None]) -> None:
    """Every saved question and more, in Python and as commands."""
    folder = str(results)
    report_command("status", STATUS, "status", folder)
    with open_store(folder) as store:
        for name in saved_queries.QUESTIONS:
            report(f"{name}, inside", seconds(lambda name=name: saved_queries.ask(store, name)), INSIDE)
            report_command(name, WHOLE, "query", folder, "--ask", name)
        effects = seconds(lambda: effects_frame(cells_of(store.frame("select * from runs"), "val_loss")))
        report("effects, inside", effects, INSIDE)
        report_command("effects", WHOLE, "effects", folder)
        where = "params_active < 5e7"
        report("best, inside", seconds(lambda: best(store, "usefulness", 24, where=where)), INSIDE)
        report_command("best", WHOLE, "best", folder, "--by", "usefulness", "--depth", "24", "--where", where)
    report_command("SQL on runs", WHOLE, "query", folder, "select count(*) from runs")
    report_command("SQL on layers", WHOLE, "query", folder, "select avg(value) from layers")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--opening", action="store_true", help="measure nothing but the opening of the store")
    parser.add_argument("--folder", type=Path, help="where the store is kept; else in a temporary folder")
    given = parser.parse_args()
    exceeded = []

    def report(name: str, cpu: float, limit: float, wall: float | None = None) -> None:
        if cpu > limit:
            exceeded.append(name)
        print(f"{name:28} {cpu:7.3f} s of {limit:.1f}" + (f"   wall {wall:.2f} s" if wall else ""), flush=True)

    def report_command(name: str, limit: float, *words: str) -> None:
        cpu, wall = command(*words)
        report(name, cpu, limit, wall)

    with tempfile.TemporaryDirectory() as temporary:
        results = given.folder or Path(temporary, "results")
        if not results.exists():
            results.mkdir()
            fill(results, given.runs)
        measure_opening(results, report)
        if not given.opening:
            measure_questions(results, report, report_command)
    if exceeded:
        print(f"beyond the limit: {', '.join(exceeded)}")
    return int(bool(exceeded))


if __name__ == "__main__":
    sys.exit(main())
