"""What a sweep will run: its tasks, in the order in which they start.

The cells of a grid, and of the samplers random and qmc, are known from the definition alone: a task is one run (a cell
with one seed), the longest first within each round of seeds, so that every cell has its first replicate early and the
last workers finish together. Where fields are tuned, the tasks grow as results come in: the grid of each cell with the
tuning seeds, its extension, then the seeds of the results at the best value. With tpe and nsga2 a task is a proposal
with all its seeds, since the sampler wants their mean.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from sparsedepth import quantities
from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import Cell, Interval
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.files import digest
from sparsedepth.plan.match import Match, match, summary
from sparsedepth.plan.tune import GridPoint, TuningProgress, tune

LOOKED_AT = 10_000
"""Points among which a sampler's first proposal is looked for."""

LossOf = Callable[[str], float | None]
"""run_id -> the first objective as a loss (lower is better); math.inf: diverged or failed for good; None: to come."""


def no_results(run_id: str) -> float | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Task:
    """One entry of the queue: an Optuna trial."""

    cell: Cell | None
    """RunConfig fields over the base; None where the sampler proposes them"""
    seeds: list[int]
    proposal_index: int = 0
    """tells one proposal from another"""

    @cached_property
    def key(self) -> str:
        return digest({"cell": self.cell, "seeds": self.seeds, "proposal_index": self.proposal_index})


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A task of one run, with what is often asked of it."""

    task: Task
    config: RunConfig
    run_id: str
    flops: float


class Plan:
    """The cells of a definition, resolved once; `tasks` then says what is to be run, given what is finished."""

    def __init__(self, definition: SweepDefinition):
        """Raises ValueError for a cell that cannot be built or matched, and where no cell is left."""
        self.definition = definition
        self.infeasible: list[tuple[Cell, str]] = []
        """cells beyond a constraint, with the reason: they are left out"""
        self.matches: list[Match] = []
        self._planned: dict[str, Planned] = {}
        self._seeds: dict[str, list[int]] = {}
        if definition.adaptive:
            check_proposal(definition)
            return
        replicated = _cells(definition)
        self.matches = match(definition, [cell for cell, _ in replicated])
        for cell_match, (_, seeds) in zip(self.matches, replicated, strict=True):
            self._seeds[digest(cell_match.cell)] = seeds
        feasible = []
        for cell_match in self.matches:
            config = definition.run_config(cell_match.cell, definition.seeds[0])
            if definition.prune:
                definition.prune.check_window(config.n_steps, config.log_every)
            reason = beyond(definition, config)
            if reason:
                self.infeasible.append((cell_match.cell, reason))
            else:
                feasible.append(cell_match)
        if not feasible:
            why = f": {self.infeasible[0][1]}" if self.infeasible else ""
            raise ValueError(
                f"sweep {definition.name!r} has no cell to run{why}; change its axes, exclude, constraints"
            )
        self.matches = feasible

    def tasks(self, loss_of: LossOf = no_results) -> list[Task]:
        """The whole queue as far as it is known, in the order in which it is to start."""
        if self.definition.adaptive:
            assert self.definition.n_trials is not None
            seeds = self.definition.seeds
            return [Task(cell=None, seeds=seeds, proposal_index=i) for i in range(self.definition.n_trials)]
        return [planned.task for planned in self.runs(loss_of)]

    def runs(self, loss_of: LossOf = no_results) -> list[Planned]:
        """The runs that are known, in the order in which they are to start; none of an adaptive sampler."""
        runs: dict[str, tuple[int, float, Planned]] = {}
        of_tuning = self.definition.tuning_seeds
        for cell_match in self.matches:
            cells = [(cell_match.cell, self.seeds_of(cell_match), 0)]
            if self.definition.tune:
                tuning = self.tuning(cell_match.cell, loss_of)
                best = [tuning.best] if tuning.best else []
                points = [point for point in tuning.points if self._can_be_built(cell_match.cell, point)]
                cells = [({**cell_match.cell, **point}, of_tuning, 0) for point in points]
                cells += [({**cell_match.cell, **p}, self.seeds_of(cell_match), len(of_tuning)) for p in best]
            for cell, seeds, first in cells:
                for round_, seed in enumerate(seeds, start=first):
                    planned = self._plan(cell, seed)
                    runs.setdefault(planned.run_id, (round_, -planned.flops, planned))
        return [planned for _, _, planned in sorted(runs.values(), key=lambda entry: entry[:2])]

    def seeds_of(self, cell_match: Match) -> list[int]:
        """The seeds of a cell's results."""
        return self._seeds[digest(cell_match.cell)]

    def results_to_come(self, loss_of: LossOf = no_results) -> list[tuple[Match, int]]:
        """The cells and seeds that will run at a tuned value which is not known yet, and are no runs of the tuning."""
        tuned = self.matches if self.definition.tune else []
        untuned = [cell_match for cell_match in tuned if self.tuning(cell_match.cell, loss_of).best is None]
        pairs = [(cell_match, seed) for cell_match in untuned for seed in self.seeds_of(cell_match)]
        return [pair for pair in pairs if pair[1] not in self.definition.tuning_seeds]

    def tuning(self, cell: Cell, loss_of: LossOf) -> TuningProgress:
        """How far the tuning of a cell has come; an extension that cannot be built is the worst."""

        def loss_at(point: GridPoint) -> float | None:
            if not self._can_be_built(cell, point):
                return math.inf
            planned = [self._plan({**cell, **point}, seed) for seed in self.definition.tuning_seeds]
            losses = [loss_of(run.run_id) for run in planned]
            return None if None in losses else fmean(losses)  # ty: ignore[invalid-argument-type] - none is None

        return tune(self.definition.tune, loss_at, self.definition.tune_extensions)

    def _can_be_built(self, cell: Cell, point: GridPoint) -> bool:
        """Whether a point of a tuning grid can be built: one that the definition lists has to be."""
        if all(value in self.definition.tune[name] for name, value in point.items()):
            return True
        try:
            self._plan({**cell, **point}, self.definition.tuning_seeds[0])
        except ValueError:
            return False
        return True

    def is_open(self, loss_of: LossOf) -> bool:
        """Whether runs will be added once those that are known are finished."""
        if not self.definition.tune or self.definition.adaptive:
            return False
        return any(self.tuning(cell_match.cell, loss_of).best is None for cell_match in self.matches)

    def notes(self) -> list[str]:
        """What should be known before the start: sizes that were solved for, cells that are left out, conditions that
        leave out none, trials that draw no cell, and objectives that a search can raise without a block that does
        more."""
        definition, drawn = self.definition, len(self.matches) + len(self.infeasible)
        notes = [*summary(definition, self.matches), *(f"left out: {cell}: {why}" for cell, why in self.infeasible)]
        if definition.sampler == "grid":
            notes += definition.idle_conditions()
        elif not definition.adaptive and drawn < (definition.n_trials or 0):
            notes.append(f"n_trials={definition.n_trials} draw {drawn} cells: the others repeat one or are excluded")
        return [*notes, *_relative_objectives(definition)]

    def run_ids(self, task: Task) -> list[str]:
        """The runs of a task; none of a proposal, whose cell is not known."""
        return [] if task.cell is None else [self._plan(task.cell, seed).run_id for seed in task.seeds]

    def config_of(self, task: Task) -> RunConfig:
        """The run of a task whose cell is known; the first of several."""
        assert task.cell is not None
        return self._plan(task.cell, task.seeds[0]).config

    @property
    def expected(self) -> int:
        """Runs in all: with `tune` at least, since an extension adds some; of an adaptive sampler at most."""
        if self.definition.adaptive or not self.definition.tune:
            return sum(len(task.seeds) for task in self.tasks())
        return len(self.runs()) + len(self.results_to_come())

    def _plan(self, cell: Cell, seed: int) -> Planned:
        task = Task(cell=cell, seeds=[seed])
        if task.key not in self._planned:
            config = self.definition.run_config(cell, seed)
            flops = cost(config).train_flops(config.train_tokens)
            self._planned[task.key] = Planned(task=task, config=config, run_id=config.run_id, flops=flops)
        return self._planned[task.key]


def _cells(definition: SweepDefinition) -> list[tuple[Cell, list[int]]]:
    """The cells of a grid, or the points that random and qmc draw, before any is matched; each with its seeds."""
    if definition.sampler == "grid":
        return list(definition.replicated_grid())
    from sparsedepth.plan.propose import proposals  # Optuna, which `status` of a grid does not need

    return [(cell, definition.seeds) for cell in proposals(definition)]


def beyond(definition: SweepDefinition, config: RunConfig) -> str:
    """Which constraints a run breaks, in words; '' if none."""
    excess = {name: value for name, value in excesses(definition, config).items() if value > 0}
    return ", ".join(f"{name} is {value:.1%} above {definition.constraints[name]:g}" for name, value in excess.items())


def excesses(definition: SweepDefinition, config: RunConfig) -> dict[Any, float]:
    """amount / bound - 1 of each constraint: above 0 it is broken."""
    counted = cost(config)
    amounts = {
        "params_total": counted.params_total,
        "params_active": counted.params_active,
        "flops_per_token": counted.flops_per_token,
        "train_flops": counted.train_flops(config.train_tokens),
    }
    return {name: amounts[name] / bound - 1 for name, bound in definition.constraints.items()}


def first_proposal(definition: SweepDefinition) -> Cell:
    """One cell of a sampler's axes, to see that it can be built: of their values and ends the first that is not
    excluded, or the first where the first LOOKED_AT are."""
    values = [_ends(axis) if isinstance(axis, Interval) else axis for axis in definition.axes.values()]
    points = itertools.islice(itertools.product(*values), LOOKED_AT)
    cells = (definition.cell(dict(zip(definition.axes, point, strict=True))) for point in points)
    first = next(cells)
    return next((cell for cell in itertools.chain([first], cells) if not definition.is_excluded(cell)), first)


def _ends(axis: Interval) -> tuple[float, float]:
    return (int(axis.low), int(axis.high)) if axis.whole else (axis.low, axis.high)


def check_proposal(definition: SweepDefinition) -> None:
    """Check a proposal. Raises ValueError where a proposal cannot be built or never pruned, or proposals could not
    match."""
    config = definition.run_config(first_proposal(definition), definition.seeds[0])
    if definition.prune:
        definition.prune.check_window(config.n_steps, config.log_every)
    moving = {"tokens": ("train_tokens",), "steps": ("train_tokens", "batch_tokens")}.get(definition.matched, ())
    for name in moving:
        if name in definition.varied:
            raise ValueError(f"sweep {definition.name!r} is matched in {definition.matched}, but its axes move {name}")


def check_objective(definition: SweepDefinition) -> list[Literal["minimize", "maximize"]]:
    """'minimize' or 'maximize' for each objective. Raises ValueError for one that is no column with a better direction,
    or that the sweep does not measure."""
    directions: list[Literal["minimize", "maximize"]] = []
    for name in definition.objectives:
        quantity = quantities.rankable(name)
        measures = definition.base.get("measures", RunConfig.model_fields["measures"].default)
        if quantity.measure and quantity.measure not in measures:
            raise ValueError(f"objective={name!r} needs {quantity.measure!r} among the measures of the sweep's base")
        directions.append("minimize" if quantity.better == "low" else "maximize")
    return directions


def _relative_objectives(definition: SweepDefinition) -> list[str]:
    """A note for each objective that is divided by the loss of its run: where that loss is small it calls blocks useful
    that nothing depends on, so a search for it may find a small loss and not a deep model."""
    return [
        f"objective {name} is relative to the loss of the run and rises where the loss is small, though nothing more "
        f"depends on the blocks; its absolute form is affine_loss_added (nat/token)"
        for name in definition.objectives
        if quantities.rankable(name).is_relative
    ]
