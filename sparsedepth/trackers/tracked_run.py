"""A finished run in the form of a tracker: parameters, curves by step, summary, tags."""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from datetime import datetime

from sparsedepth import quantities
from sparsedepth.config.run import RunConfig
from sparsedepth.store.connection import Store

FACTS = ("seconds", "training_seconds", "peak_memory_bytes")
"""Numbers of the manifest in the summary."""
TAGS = ("run_id", "cell_id", "model", "outcome", "diverged_cause", "tuning", "device", "started")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Missing values are left out."""

    run_id: str
    params: dict[str, bool | int | float | str]
    """Fields of the configuration."""
    curves: tuple[tuple[int, dict[str, float]], ...]
    """(step, values), in order."""
    summary: dict[str, float]
    """Measured quantities, named as the columns of `runs`."""
    tags: dict[str, str]
    started: float
    """Unix time; 0 if unknown."""

    @property
    def last_step(self) -> int:
        return int(self.summary.get("steps", 0)) or max((step for step, _ in self.curves), default=0)

    def time_at(self, step: int) -> float:
        """Unix time of a step, if all steps take equally long."""
        share = step / self.last_step if self.last_step else 1.0
        return self.started + share * self.summary.get("training_seconds", 0.0)


def tracked_runs(store: Store, sent: Set[str] = frozenset()) -> Iterator[TrackedRun]:
    """The runs of the store that are not sent yet, in order of run_id."""
    measured = {column.name for column in quantities.RUNS} | {*FACTS}
    for record in store.sql("select * from runs order by run_id").records():
        row = {name: value for name, value in record.items() if value is not None}
        if row["run_id"] not in sent:
            yield TrackedRun(
                run_id=row["run_id"],
                params={name: row[name] for name in RunConfig.model_fields if name in row},
                curves=tuple(_curves(store, row["run_id"])),
                summary={name: float(row[name]) for name in row if name in measured and not isinstance(row[name], str)},
                tags={name: str(row[name]) for name in TAGS if name in row},
                started=datetime.fromisoformat(row["started"]).timestamp() if "started" in row else 0.0,
            )


def _curves(store: Store, run_id: str) -> Iterator[tuple[int, dict[str, float]]]:
    answer = store.sql(f"select * exclude (run_id) from curves where run_id = '{run_id}' order by step")
    for row in answer.records():
        step = int(row.pop("step"))
        yield step, {name: float(value) for name, value in row.items() if value is not None}
