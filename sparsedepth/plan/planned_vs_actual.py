"""Planned against actual: what a sweep was priced at, beside what its complete runs came to.

`sweep` writes RESULTS/plan.json before it starts. A run's deviation is actual / planned - 1. Some runs share the
machine with more than others, so the median over runs is the deviation of time; of memory it is the worst.
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
from sparsedepth.config.run import RunConfig
from sparsedepth.plan.duration import shape_id
from sparsedepth.plan.price import Price, ShapePrice, as_json
from sparsedepth.store.cache import read_columns
from sparsedepth.store.find import is_complete_run

PLAN = "plan.json"


def write_plan(results: Path, price: Price, runs: Sequence[RunConfig]) -> None:
    """Keep the price of a sweep with its results; the one that is there stays once all runs that are known (of an
    adaptive sampler none is) are complete."""
    if runs and (results / PLAN).exists() and all(is_complete_run(results, run.run_id) for run in runs):
        return
    results.mkdir(parents=True, exist_ok=True)
    files.write_json(results / PLAN, as_json(price))


def planned(results: Path, config: RunConfig) -> dict[str, Any]:
    """What a run was priced at, as facts of its manifest; empty where it was not."""
    kind = _kinds(results).get(shape_id(config))
    if kind is None:
        return {}
    return {"planned_seconds": kind.seconds.value, "planned_memory_bytes": kind.memory_bytes}


def measured_peaks(results: Path, runs: Sequence[RunConfig], device: str) -> list[tuple[RunConfig, int]]:
    """The runs that were made on a 'cpu' or on 'cuda', with the peak of memory that each had. None before the
    first run, when there is no folder yet."""
    if not results.is_dir():
        return []
    rows = read_columns(results, ("outcome", "device", "peak_memory_bytes"), damaged=[])
    known = [(run, rows[run.run_id]) for run in runs if rows.get(run.run_id, {}).get("outcome") == "ok"]
    here = [
        (run, facts.get("peak_memory_bytes")) for run, facts in known if str(facts.get("device")).startswith(device)
    ]
    return [(run, peak) for run, peak in here if peak]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """actual / planned - 1 over the complete runs of a sweep; None where nothing can be compared."""

    runs: int
    params: float
    """the largest, by size"""
    flops: float
    memory: float | None
    seconds: float | None
    """the median"""
    slowest: float | None
    """the largest, by size"""
    factor: float
    """within which the planned times were said to be right"""


ACTUAL = ("outcome", "seconds", "peak_memory_bytes", "params_total", "train_flops")
"""The columns of `runs` that `compare` reads."""


def compare(results: Path, runs: Sequence[RunConfig], rows: Mapping[str, Mapping[str, Any]]) -> Deviation | None:
    """The deviations of those of `runs` that trained to their end; None where there is no plan, or nothing to compare.
    `rows` are the ACTUAL columns of complete runs by run_id."""
    kinds = _kinds(results)
    finished = [run for run in runs if rows.get(run.run_id, {}).get("outcome") == "ok"] if kinds else []
    pairs = [(kind, rows[run.run_id]) for run in finished if (kind := kinds.get(shape_id(run)))]
    if not pairs:
        return None

    def deviations(actual: str, of_plan: str) -> list[float]:
        amounts = [(facts.get(actual), attrgetter(of_plan)(kind)) for kind, facts in pairs]
        return [had / plan - 1 for had, plan in amounts if had is not None and plan > 0]

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
    """The comparison in one line."""
    memory = "not recorded" if deviation.memory is None else f"{deviation.memory:+.0%} at worst"
    params = "exact" if deviation.params == 0 else f"{deviation.params:+.2%}"
    seconds = "not recorded"
    if deviation.seconds is not None:
        away = abs(math.log1p(deviation.seconds)) if deviation.seconds > -1 else math.inf
        is_within = "within" if away <= math.log(deviation.factor) else "beyond"
        seconds = (
            f"{deviation.seconds:+.0%} (median, {is_within} the factor of {deviation.factor:.3g} that was planned; "
            f"{deviation.slowest:+.0%} at worst)"
        )
    return (
        f"actual against planned, {deviation.runs} runs: parameters {params}, FLOPs {deviation.flops:+.1%}, "
        f"memory {memory}, time {seconds}"
    )


def _largest(deviations: Sequence[float]) -> float | None:
    return max(deviations, key=abs, default=None)


def _kinds(results: Path) -> dict[str, ShapePrice]:
    """plan.json by shape; empty where it is missing or damaged: it is no result, and made again by the next `sweep`."""
    try:
        kinds = files.parse_json(files.read_regular(results / PLAN))["kinds"]
        checked = TypeAdapter(list[ShapePrice]).validate_python(kinds)
        return {kind.shape_id: kind for kind in checked if kind.seconds.factor >= 1}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
