"""Fill a study from the run folders: after it was deleted, and for runs that a sweep finds finished.

The folders are the record; the study only has to know enough to go on, and to be looked at. Proposals without any run
(infeasible ones) leave no folder, and are asked for again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.propose import plain
from sparsedepth.plan.results_index import ResultsIndex
from sparsedepth.plan.tasks import Plan, Task, excesses
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import folder as record
from sparsedepth.sweep import study as queue


def rebuild(study: optuna.Study, plan: Plan, results: Path, finished: ResultsIndex) -> int:
    """Add a trial for each finished item that the study does not know. Returns how many."""
    if plan.definition.adaptive:
        return _proposals(study, plan.definition, results)
    known = {item.key for trial in study.get_trials(deepcopy=False) if (item := queue.item_of(trial))}
    added = 0
    for planned in plan.runs(finished):
        if planned.item.key not in known and finished.is_complete(planned.run_id):
            _add(study, plan.definition, planned.item, [planned.config], [_summary(results, planned.run_id)])
            added += 1
    return added


def _proposals(study: optuna.Study, definition: SweepDefinition, results: Path) -> int:
    """In an empty study of a learning sampler: each proposal whose runs are all finished, or one of them pruned."""
    assert definition.n_trials is not None
    if study.get_trials(deepcopy=False):
        return 0
    cells: dict[str, dict[int, tuple[RunConfig, Mapping[str, Any] | None]]] = {}
    for config, summary in (*_complete(results), *_pruned(results)):
        point = {name: getattr(config, name) for name in definition.axes}
        if config.seed in definition.seeds and _is_proposal(definition, point, config):
            cells.setdefault(config.cell_id, {})[config.seed] = (config, summary)
    whole = [
        found
        for found in cells.values()
        if len(found) == len(definition.seeds) or any(summary is None for _, summary in found.values())
    ]
    for proposal_index, found in enumerate(whole[: definition.n_trials]):
        configs, summaries = zip(*found.values(), strict=True)
        ended = [summary for summary in summaries if summary is not None]
        item = Task(cell=None, seeds=definition.seeds, proposal_index=proposal_index)
        _add(study, definition, item, configs, ended if len(ended) == len(summaries) else [])
    return len(whole)


def _is_proposal(definition: SweepDefinition, point: Mapping[str, Any], config: RunConfig) -> bool:
    try:
        return definition.run_config(definition.cell(point), config.seed).run_id == config.run_id
    except ValueError:  # a value that is none of an axis's
        return False


def _complete(results: Path) -> list[tuple[RunConfig, Mapping[str, Any] | None]]:
    found: list[tuple[RunConfig, Mapping[str, Any] | None]] = []
    for marker in sorted((results / "runs").glob(f"*/{record.MARKER}")):
        try:
            run = record.read_run(marker.parent)
        except record.DamagedRun:
            continue  # its run is made again when its proposal comes up
        found.append((run.config, run.summary))
    return found


def _pruned(results: Path) -> list[tuple[RunConfig, Mapping[str, Any] | None]]:
    found: list[tuple[RunConfig, Mapping[str, Any] | None]] = []
    for path in sorted((results / "work").glob("*/pruned.json")):
        if Scratch(results, path.parent.name).pruned():
            found.append((build(RunConfig, read_yaml(path.parent / "config.yaml"), str(path.parent)), None))
    return found


def _summary(results: Path, run_id: str) -> Mapping[str, Any]:
    return record.read_run(record.run_folder(results, run_id)).summary


def _add(
    study: optuna.Study,
    definition: SweepDefinition,
    item: Task,
    configs: Sequence[RunConfig],
    summaries: Sequence[Mapping[str, Any]],
) -> None:
    """One settled trial; no summaries: it was pruned."""
    means = queue.means_of(definition, summaries) if summaries else {}
    values = [mean for name in definition.objectives if (mean := means.get(name)) is not None]
    axes = queue.distributions(definition)
    cell = item.cell
    if cell is None:
        cell = definition.cell({name: getattr(configs[0], name) for name in definition.axes})
    params = {name: plain(cell[name]) for name in axes if name in cell}
    shown = {name: mean for name, mean in means.items() if mean is not None}
    run_ids = {f"run_id_seed_{config.seed}": config.run_id for config in configs}
    complete = len(values) == len(definition.objectives)
    study.add_trial(
        optuna.trial.create_trial(
            state=TrialState.COMPLETE if complete else TrialState.PRUNED,
            values=values if complete else None,
            params=params,
            distributions={name: axes[name] for name in params},
            user_attrs={**queue.attributes(item), "cell": cell, **shown, **run_ids},
            constraints={"buildable": 0.0, **excesses(definition, configs[0])},
        )
    )
