"""Compare the planned cost of a sweep with the actual cost of its complete runs.

`sweep` writes RESULTS/plan.json before it starts. A run's deviation is actual / planned - 1. For time it is the median
over runs, since load differs between runs; for memory it is the largest.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sparsedepth import files
from sparsedepth.config.plain_text import counted
from sparsedepth.config.run import RunConfig
from sparsedepth.plan.duration import shape_id
from sparsedepth.plan.price import Price, ShapePrice, as_json
from sparsedepth.store.cache import read_columns
from sparsedepth.store.find import is_complete_run

PLAN = "plan.json"


def write_plan(results: Path, price: Price, runs: Sequence[RunConfig]) -> None:
    """Store the price of a sweep with its results, unless all runs are complete and it is already stored. The runs of
    an adaptive sampler are unknown, so its price is always stored."""
    if runs and (results / PLAN).exists() and all(is_complete_run(results, run.run_id) for run in runs):
        return
    results.mkdir(parents=True, exist_ok=True)
    files.write_json(results / PLAN, as_json(price))


def planned_cost(results: Path, config: RunConfig) -> dict[str, Any]:
    """The planned cost of a run for its manifest; empty without a plan."""
    kind = _kinds(results).get(shape_id(config))
    if kind is None:
        return {}
    return {"planned_seconds": kind.seconds.value, "planned_memory_bytes": kind.memory_bytes}


def measured_peaks(results: Path, runs: Sequence[RunConfig], device: str) -> list[tuple[RunConfig, int]]:
    """The complete runs on a 'cpu' or on 'cuda', with their peak memory."""
    if not results.is_dir():
        return []
    rows = read_columns(results, ("outcome", "device", "peak_memory_bytes"), damaged=[])
    complete = [(run, rows[run.run_id]) for run in runs if rows.get(run.run_id, {}).get("outcome") == "ok"]
    return [
        (run, row["peak_memory_bytes"])
        for run, row in complete
        if str(row.get("device")).startswith(device) and row.get("peak_memory_bytes")
    ]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """actual / planned - 1 over the complete runs of a sweep; None if not recorded."""

    runs: int
    params: float
    """the largest in size"""
    flops: float
    memory: float | None
    seconds: float | None
    """the median"""
    slowest: float | None
    """the largest in size"""
    factor: float
    """the planned accuracy of time"""


ACTUAL = ("outcome", "seconds", "peak_memory_bytes", "params_total", "train_flops")
"""The columns of `runs` that `compare` reads."""


def compare(results: Path, runs: Sequence[RunConfig], rows: Mapping[str, Mapping[str, Any]]) -> Deviation | None:
    """The deviations of the runs that trained to the end; None without a plan or such runs. `rows` are the ACTUAL
    columns of complete runs by run_id."""
    kinds = _kinds(results)
    finished = [run for run in runs if rows.get(run.run_id, {}).get("outcome") == "ok"] if kinds else []
    pairs = [(kind, rows[run.run_id]) for run in finished if (kind := kinds.get(shape_id(run)))]
    if not pairs:
        return None

    def deviations(column: str, planned: str) -> list[float]:
        amounts = [(row.get(column), attrgetter(planned)(kind)) for kind, row in pairs]
        return [actual / plan - 1 for actual, plan in amounts if actual is not None and plan > 0]

    seconds = deviations("seconds", "seconds.value")
    return Deviation(
        runs=len(pairs),
        params=_largest(deviations("params_total", "params_total")) or 0.0,
        flops=_largest(deviations("train_flops", "train_flops")) or 0.0,
        memory=_largest(deviations("peak_memory_bytes", "memory_bytes")),
        seconds=statistics.median(seconds) if seconds else None,
        slowest=_largest(seconds),
        factor=max(kind.seconds.factor for kind, _ in pairs),
    )


def describe(deviation: Deviation) -> str:
    """'actual vs planned, 27 runs: parameters exact, FLOPs +0.0%, memory -10% (largest deviation), time +40% (..)'."""
    memory = "not recorded" if deviation.memory is None else f"{deviation.memory:+.0%} (largest deviation)"
    params = "exact" if deviation.params == 0 else f"{deviation.params:+.2%}"
    seconds = "not recorded"
    if deviation.seconds is not None:
        log_ratio = abs(math.log1p(deviation.seconds)) if deviation.seconds > -1 else math.inf
        position = "within" if log_ratio <= math.log(deviation.factor) else "outside"
        seconds = (
            f"{deviation.seconds:+.0%} (median, {position} the planned factor of {deviation.factor:.3g}; "
            f"largest {deviation.slowest:+.0%})"
        )
    return (
        f"actual vs planned, {counted(deviation.runs, 'run')}: parameters {params}, FLOPs {deviation.flops:+.1%}, "
        f"memory {memory}, time {seconds}"
    )


def _largest(deviations: Sequence[float]) -> float | None:
    return max(deviations, key=abs, default=None)


def _kinds(results: Path) -> dict[str, ShapePrice]:
    """plan.json by shape; empty if it is missing or damaged, since the next `sweep` writes it again."""
    try:
        kinds = files.parse_json(files.read_regular(results / PLAN))["kinds"]
        checked = TypeAdapter(list[ShapePrice]).validate_python(kinds)
        return {kind.shape_id: kind for kind in checked if kind.seconds.factor >= 1}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
