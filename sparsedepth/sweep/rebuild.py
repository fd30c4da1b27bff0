"""Rebuild a study from the run folders, if it was deleted, or for runs that were finished elsewhere.

The folders are the record; the study only needs enough to continue and for dashboards. Proposals without any run
(infeasible ones) leave no folder, and are proposed again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import cell_digest, in_axis
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.propose import plain
from sparsedepth.plan.tasks import Plan, Task, constraint_excess
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import run_record
from sparsedepth.sweep import trial_queue
from sparsedepth.sweep.run_end import ResultsIndex

ConfigAndSummary = tuple[RunConfig, Mapping[str, Any] | None]
"""A run and its summary; None if it was pruned."""


def rebuild(study: optuna.Study, plan: Plan, results: Path, results_index: ResultsIndex) -> None:
    """Add a trial for each finished task that is not in the study."""
    if plan.definition.adaptive:
        _add_proposals(study, plan.definition, results)
        return
    known = {task.key for trial in study.get_trials(deepcopy=False) if (task := trial_queue.task_of(trial))}
    for planned in plan.runs(results_index.loss_of):
        if planned.task.key not in known and results_index.is_complete(planned.run_id):
            summary = run_record.read_run(run_record.run_folder(results, planned.run_id)).summary
            _add(study, plan.definition, planned.task, [(planned.config, summary)])


def _add_proposals(study: optuna.Study, definition: SweepDefinition, results: Path) -> None:
    """Add a proposal for each cell whose runs are all finished, or one of them pruned, up to the number of unused
    proposals."""
    trials = study.get_trials(deepcopy=False)
    known = {cell_digest(trial.user_attrs["cell"]) for trial in trials if "cell" in trial.user_attrs}
    used = {task.proposal_index for trial in trials if (task := trial_queue.task_of(trial))}
    unused = [index for index in range(definition.n_trials or 0) if index not in used]
    if not unused:
        return
    cells: dict[str, dict[int, ConfigAndSummary]] = {}
    for config, summary in _finished(results):
        cell = _cell_of(definition, config)
        if cell is not None and config.seed in definition.seeds and cell_digest(cell) not in known:
            cells.setdefault(config.cell_id, {})[config.seed] = (config, summary)
    finished = [
        list(runs.values())
        for runs in cells.values()
        if len(runs) == len(definition.seeds) or any(summary is None for _, summary in runs.values())
    ]
    for proposal_index, runs in zip(unused, finished, strict=False):
        _add(study, definition, Task(cell=None, seeds=definition.seeds, proposal_index=proposal_index), runs)


def _cell_of(definition: SweepDefinition, config: RunConfig) -> dict[str, Any] | None:
    """The cell of a run if a sampler could have proposed it, else None."""
    try:
        cell = definition.cell({name: getattr(config, name) for name in definition.axes})
        is_proposal = definition.run_config(cell, config.seed).run_id == config.run_id
    except ValueError:  # a value that is not on its axis
        return None
    has_values = all(in_axis(axis, cell[name]) for name, axis in definition.axes.items() if name in cell)
    return cell if is_proposal and has_values and not definition.is_excluded(cell) else None


def _finished(results: Path) -> Iterator[ConfigAndSummary]:
    """The complete runs, then the pruned ones."""
    for marker in sorted((results / "runs").glob(f"*/{run_record.MARKER}")):
        try:
            run = run_record.read_run(marker.parent)
        except run_record.DamagedRun:
            continue  # repeated when its proposal comes up
        yield run.config, run.summary
    for path in sorted((results / "work").glob("*/pruned.json")):
        try:
            config = build(RunConfig, read_yaml(path.parent / "config.yaml"), str(path.parent))
        except ValueError:
            continue  # damaged: it is pruned again when its proposal comes up
        if Scratch(results, path.parent.name).pruned():
            yield config, None


def _add(study: optuna.Study, definition: SweepDefinition, task: Task, runs: Sequence[ConfigAndSummary]) -> None:
    configs = [config for config, _ in runs]
    summaries = [summary for _, summary in runs if summary is not None]
    is_pruned = len(summaries) < len(runs)
    means = {} if is_pruned else trial_queue.means_of(definition, summaries)
    axes = trial_queue.distributions(definition)
    cell = task.cell or _cell_of(definition, configs[0]) or {}
    params = {name: plain(cell[name]) for name in axes if name in cell}
    run_ids = {f"run_id_seed_{config.seed}": config.run_id for config in configs}
    pruned = {"pruned": "see its scratch folder"} if is_pruned else {}
    is_scored = {*definition.objectives} <= {*means}
    study.add_trial(
        optuna.trial.create_trial(
            state=TrialState.COMPLETE if is_scored else TrialState.PRUNED,
            values=[means[name] for name in definition.objectives] if is_scored else None,
            params=params,
            distributions={name: axes[name] for name in params},
            user_attrs={"task": asdict(task), "cell": cell, **means, **run_ids, **pruned},
            constraints={"buildable": 0.0, **constraint_excess(definition, configs[0])},
        )
    )
