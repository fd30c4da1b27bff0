"""State of a sweep's runs, read only from its folder: no lock, no study, no torch; works on any machine."""

import functools
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparsedepth import quantities
from sparsedepth.config.plain_text import visible
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.tasks import Plan
from sparsedepth.run.allocation import Allocation
from sparsedepth.run.lease import is_held
from sparsedepth.run.scratch import Progress, Scratch
from sparsedepth.store import run_record
from sparsedepth.store.checksums import RUN_ID
from sparsedepth.store.find import is_complete_run, read_summary
from sparsedepth.store.pack import WORK, is_pack, open_pack
from sparsedepth.sweep.run_end import EndRule, EndState, ResultsIndex, end_rule

State = Literal["complete", "running", "interrupted", "planned", "damaged"] | EndState


@dataclass(frozen=True, kw_only=True)
class RunState:
    run_id: str
    state: State
    progress: Progress | None = None
    """of a running or interrupted run"""
    reason: str | None = None
    """why it ended without a result; of a run that is to be computed again: why it failed last"""
    config: RunConfig | None
    starts: Sequence[Allocation] = ()
    """of an incomplete run: the Slurm tasks that computed it"""

    @property
    def done(self) -> float:
        """Share of the run that is done, 0 to 1."""
        if self.state == "complete":
            return 1.0
        return self.progress.done if self.progress and self.state != "planned" else 0.0


def state_of(results: Path, run_id: str, config: RunConfig | None = None, rule: EndRule | None = None) -> RunState:
    """What a run's lock and records in its folder say; `rule` (default: the folder's) tells which runs have ended."""
    scratch = Scratch(results, run_id)
    if is_complete_run(results, run_id):
        return RunState(run_id=run_id, state="complete", config=config)
    if not _has_scratch(scratch):
        return RunState(run_id=run_id, state="planned", config=config)
    state: State = "planned"
    reason = None
    if is_held(scratch.lock):
        state = "running"
    elif end := (rule or end_rule(results, None))(scratch):
        state, reason = end
    elif failures := scratch.failures():
        state, reason = "interrupted", failures[-1]
    elif scratch.checkpoints.exists():
        state = "interrupted"
    progress, starts = scratch.progress(), scratch.allocations()
    return RunState(run_id=run_id, state=state, progress=progress, reason=reason, config=config, starts=starts)


def _has_scratch(scratch: Scratch) -> bool:
    """Whether the run has been begun: avoids opening several files for each planned run."""
    return scratch.folder.exists() or is_pack(scratch.results)


def without_result(results: Path, rule: EndRule) -> Callable[[str], bool]:
    """Whether a run has ended without a result, by run_id; each folder is read once."""

    @functools.cache
    def has_ended(run_id: str) -> bool:
        scratch = Scratch(results, run_id)
        return _has_scratch(scratch) and rule(scratch) is not None and not is_held(scratch.lock)

    return has_ended


def _results_index(definition: SweepDefinition, results: Path, max_attempts: int | None) -> ResultsIndex:
    return ResultsIndex(results, definition, without_result(results, end_rule(results, definition, max_attempts)))


def known_runs(plan: Plan, results: Path, max_attempts: int | None = None) -> list[RunConfig]:
    """The runs known so far, given the finished ones; none for an adaptive sampler."""
    index = _results_index(plan.definition, results, max_attempts)
    return [planned.config for planned in plan.runs(index.loss_of)]


def remaining_runs(plan: Plan, results: Path, max_attempts: int | None = None) -> list[RunConfig]:
    """The expected runs of a sweep that are neither complete in `results` nor ended without a result."""
    if plan.definition.adaptive:  # proposals are unknown, so complete runs are only counted
        return plan.expected_runs()[len(list(results.glob(f"runs/*/{run_record.MARKER}"))) :]
    index = _results_index(plan.definition, results, max_attempts)
    return [run for run in plan.expected_runs(index.loss_of) if index.loss_of(run.run_id) is None]


def scan(
    results: Path,
    definition: SweepDefinition | None,
    runs: Sequence[RunConfig] | None = None,
    max_attempts: int | None = None,
) -> list[RunState]:
    """The state of every known run of the folder. `runs` are the definition's planned runs, for a caller that scans
    repeatedly: building them takes most of the time. `max_attempts`: default the folder's."""
    rule = end_rule(results, definition, max_attempts)
    if runs is None:
        runs = known_runs(Plan(definition), results, max_attempts) if definition else []
    planned = {config.run_id: config for config in runs}
    run_ids = {path.parent.name for path in (results / "runs").glob(f"*/{run_record.MARKER}")}
    run_ids |= {path.parent.name for path in (results / "work").glob("*/config.yaml")}
    if definition is None:  # `train` writes no configuration there
        locks = (results / "work").glob("*/lock")
        run_ids |= {lock.parent.name for lock in locks if (lock.parent / "checkpoints").exists() or is_held(lock)}
    if is_pack(results):
        pack = open_pack(results)
        run_ids |= pack.run_ids | {place.partition("/")[2] for place in pack.places(WORK)}
    run_ids = {name for name in run_ids if re.fullmatch(RUN_ID, name)}
    if definition and not definition.adaptive:
        run_ids &= set(planned)  # runs of an earlier version of the definition are not this sweep's
    run_ids_in_order = [*planned, *sorted(run_ids - set(planned))]
    return [state_of(results, run_id, planned.get(run_id), rule) for run_id in run_ids_in_order]


def other_runs_note(run_ids: Iterable[str], states: Sequence[RunState]) -> str:
    """A line about complete runs of the folder that are not in its definition; '' if there are none.

    The rule: a sweep runs and counts what its definition lists; commands that read results read every complete run.
    """
    others = {*run_ids} - {state.run_id for state in states}
    if not others:
        return ""
    return (
        f"{len(others)} other complete runs are in the folder (from an earlier version of the definition, or `train`); "
        "query, best, plot, effects and recipe include them; to exclude them, move them out of runs/"
    )


class BestSoFar:
    """The best complete run so far; each summary is read only once."""

    def __init__(self, results: Path, objective: str):
        self.objective, self.sign = objective, -quantities.sign(objective)
        self.summary_of = functools.cache(functools.partial(_read_summary, results))

    def of(self, states: Sequence[RunState]) -> tuple[RunState, float] | None:
        """The best run and its objective; None before any run has one."""
        complete = [(state, self.value(state.run_id)) for state in states if state.state == "complete"]
        scored = [(state, value) for state, value in complete if value is not None]
        return min(scored, key=lambda pair: self.sign * pair[1], default=None)

    def value(self, run_id: str) -> float | None:
        """A complete run's objective; None if it has none."""
        value = self.summary_of(run_id).get(self.objective)
        return value if isinstance(value, int | float) else None


def _read_summary(results: Path, run_id: str) -> dict[str, Any]:
    """A run's summary; empty if it is damaged, which is reported when the record itself is read."""
    try:
        return read_summary(results, run_id)
    except (OSError, ValueError):
        return {}


def is_silent(progress: Progress, seconds: float = 120) -> bool:
    """Whether a running run has not written progress for long; its machine may be down."""
    return time.time() - progress.at > seconds


def varied_fields(definition: SweepDefinition, config: RunConfig) -> str:
    """'n_layers=4 n_kv_heads=1 lr=0.001 seed=0': depth, tuned fields and axes of a search, and of the other fields that
    the sweep varies those that differ from its base."""
    always = {"n_layers", "seed", *definition.tune, *(definition.varied if definition.is_search else ())}
    try:
        base = definition.run_config({}, config.seed)
    except ValueError:  # not every base is a whole run
        base = None
    order = sorted(definition.varied, key=lambda name: (name in definition.tune, name != "n_layers"))
    values = {name: getattr(config, name) for name in (*order, "seed")}
    shown = {name: value for name, value in values.items() if name in always or value != getattr(base, name, None)}
    texts = (f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in shown.items())
    return visible(" ".join(texts))
