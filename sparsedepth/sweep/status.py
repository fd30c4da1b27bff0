"""How a sweep stands, read from its folders alone: no lock, no study, no torch; from any machine that sees them."""

import functools
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparsedepth import quantities
from sparsedepth.config.plain_text import visible
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.results_index import planned_runs
from sparsedepth.run.allocation import Allocation
from sparsedepth.run.lease import is_held
from sparsedepth.run.scratch import Progress, Scratch
from sparsedepth.store import run_record
from sparsedepth.store.checksums import RUN_ID
from sparsedepth.store.find import is_complete_run, read_summary
from sparsedepth.store.pack import WORK, is_pack, open_pack

State = Literal["complete", "running", "interrupted", "failed", "infeasible", "pruned", "planned", "damaged"]
ENDED: tuple[State, ...] = ("failed", "infeasible", "pruned")
"""States of a run that has no result, and will have none by itself: tuning goes on without it."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    run_id: str
    state: State
    progress: Progress | None
    """of a running or interrupted run"""
    reason: str | None
    """why it failed, was pruned, or cannot be made"""
    config: RunConfig | None
    starts: Sequence[Allocation] = ()
    """of an incomplete run: the tasks of a cluster that have it in hand, or had"""

    @property
    def done(self) -> float:
        """Share of the run that is done, 0 to 1."""
        if self.state == "complete":
            return 1.0
        return self.progress.done if self.progress and self.state != "planned" else 0.0


def state_of(results: Path, run_id: str, config: RunConfig | None = None) -> RunState:
    """How one run stands."""
    scratch = Scratch(results, run_id)
    state: State = "planned"
    reason = None
    if is_complete_run(results, run_id):
        state = "complete"
    elif not scratch.folder.exists() and not is_pack(results):  # most of a sweep that begins: seven files less to try
        return RunState(run_id=run_id, state=state, progress=None, reason=None, config=config)
    elif is_held(scratch.lock):
        state = "running"
    elif pruned := scratch.pruned():
        state, reason = "pruned", pruned.reason
    elif shortage := scratch.infeasible():
        state, reason = "infeasible", f"out of memory with one sequence per forward pass: {shortage}"
    elif failures := scratch.failures():
        state, reason = "failed", failures[-1]
    elif scratch.checkpoints.exists():
        state = "interrupted"
    return RunState(
        run_id=run_id,
        state=state,
        progress=scratch.progress(),
        reason=reason,
        config=config,
        starts=scratch.allocations() if state != "complete" else (),
    )


def is_without_result(results: Path, run_id: str) -> bool:
    """Whether the run has ended without a result, for all that its folder tells."""
    return state_of(results, run_id).state in ENDED


def known_runs(definition: SweepDefinition, results: Path) -> list[RunConfig]:
    """The runs that are known, given how those before them ended."""
    return planned_runs(definition, results, functools.cache(functools.partial(is_without_result, results)))


def scan(results: Path, definition: SweepDefinition | None, runs: Sequence[RunConfig] | None = None) -> list[RunState]:
    """Every run of the folder, those still to come included where they are known.

    `runs` are the definition's planned runs, for a caller that looks often: building them is most of the work.
    """
    if runs is None:
        runs = known_runs(definition, results) if definition else []
    planned = {config.run_id: config for config in runs}
    run_ids = {path.parent.name for path in (results / "runs").glob(f"*/{run_record.MARKER}")}
    run_ids |= {path.parent.name for path in (results / "work").glob("*/config.yaml")}
    if is_pack(results):
        pack = open_pack(results)
        run_ids |= pack.run_ids | {place.partition("/")[2] for place in pack.places(WORK)}
    run_ids = {name for name in run_ids if re.fullmatch(RUN_ID, name)}
    if definition and not definition.adaptive:
        run_ids &= set(planned)  # runs of an earlier form of the definition are kept, and are not this sweep's
    return [state_of(results, run_id, planned.get(run_id)) for run_id in [*planned, *sorted(run_ids - set(planned))]]


def other_runs_note(run_ids: Iterable[str], states: Sequence[RunState]) -> str:
    """One line on complete runs of the folder that an earlier form of its definition listed; '' where there are none.

    The one rule: a sweep makes, and counts, what its definition lists; whoever reads results reads every complete run.
    """
    others = {*run_ids} - {state.run_id for state in states}
    if not others:
        return ""
    return (
        f"{len(others)} more complete runs are here, of an earlier form of the definition or of `train`: query, best, "
        f"plot, effects and recipe read them too; move them out of runs/ to leave them out"
    )


class BestSoFar:
    """The best finished run so far, for a caller that looks often: a summary is read once."""

    def __init__(self, results: Path, objective: str):
        self.results, self.objective = results, objective
        self.sign = -quantities.sign(objective)
        self.values: dict[str, float | None] = {}

    def of(self, states: Sequence[RunState]) -> tuple[RunState, float] | None:
        """The run and its value of the objective; None before any run has one."""
        valued = [(state, self.value(state.run_id)) for state in states if state.state == "complete"]
        kept = [(state, value) for state, value in valued if value is not None]
        return min(kept, key=lambda pair: self.sign * pair[1], default=None)

    def value(self, run_id: str) -> float | None:
        """A complete run's objective; None where it has none."""
        if run_id not in self.values:
            try:
                value = read_summary(self.results, run_id).get(self.objective)
            except (OSError, ValueError):  # damaged: whoever reads the record itself says so
                value = None
            self.values[run_id] = value if isinstance(value, int | float) else None
        return self.values[run_id]


def is_silent(progress: Progress, seconds: float = 120) -> bool:
    """Whether a running run has said nothing for long: its machine may be gone."""
    return time.time() - progress.at > seconds


def varied_fields(definition: SweepDefinition, config: RunConfig) -> str:
    """The fields in which a run differs from its siblings, for a line of progress."""
    return visible(" ".join(f"{name}={getattr(config, name)}" for name in (*definition.varied, "seed")))
