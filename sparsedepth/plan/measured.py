"""What finished runs took: their time and peak memory correct the estimates for the runs to come.

ratio of a shape = measured / estimated; a shape without a finished run takes the median of the others
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sparsedepth.config.run import RunConfig
from sparsedepth.store.cache import read_columns

Ratios = Mapping[str, float]
"""measured / estimated, by shape_id"""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    config: RunConfig
    device: str
    """'cuda (NVIDIA H200)'"""
    seconds: float | None
    peak_bytes: int | None
    """None where it was not recorded"""


def finished_runs(results: Path, runs: Sequence[RunConfig]) -> list[FinishedRun]:
    """Those of the runs that trained to the end in `results`."""
    if not results.is_dir():
        return []
    rows = read_columns(results, ("outcome", "device", "seconds", "peak_memory_bytes"), damaged=[])
    return [
        FinishedRun(
            config=run,
            device=row["device"] or "",
            seconds=row["seconds"],
            peak_bytes=row["peak_memory_bytes"],
        )
        for run in runs
        if (row := rows.get(run.run_id)) and row["outcome"] == "ok"
    ]


def ratio(ratios: Ratios, key: str) -> float:
    """A shape's own ratio, else the median of all shapes; 1 without any."""
    return ratios.get(key) or (median(ratios.values()) if ratios else 1.0)
