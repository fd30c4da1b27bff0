"""The tasks of a sweep, in the order in which they start.

For a grid and the samplers random and qmc, the definition alone determines the cells. A task is one run (a cell with
one seed). Tasks are ordered by seed, then longest first, so that every cell has its first replicate early and workers
finish together; with `branch_at` shortest first, then by seed, so that longer runs go on from their trunks. With tpe
and nsga2 a task is a proposal with all its seeds, since the sampler needs their mean.

With `tune`, tasks are added as results come in: each cell's grid with the tuning seeds, its extension if the best value
is at an edge, then the result seeds at the best value. One that is still at an edge is used; the store flags it
(`store.tuning_roles`), since the optimum may lie beyond. With `tune: {at: ...}` the grid is that of the same setting
at one shape, for all shapes."""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal

from sparsedepth import quantities
from sparsedepth.config.corpus import check_size, kind_of, known_size
from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import Cell, Interval
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.files import digest
from sparsedepth.plan.budgets import Match, match
from sparsedepth.store.tuning_roles import GridPoint, tune
from sparsedepth.words.sweep import excess_text

PRICED_PROPOSALS, MOST_DRAWN = 64, 1000
"""Most sample points by which an adaptive sampler's proposals are priced; and where none of these may run, most points
among which one is looked for."""

LossOf = Callable[[str], float | None]
"""run_id -> the first objective as a loss (lower is better); math.inf: diverged or failed for good; None: pending."""


def no_results(run_id: str) -> float | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Task:
    """One entry of the queue: an Optuna trial."""

    cell: Cell | None
    """RunConfig fields that override the base; None if the sampler proposes them"""
    seeds: list[int]
    proposal_index: int = 0

    @cached_property
    def key(self) -> str:
        return digest({"cell": self.cell, "seeds": self.seeds, "proposal_index": self.proposal_index})


@dataclass(frozen=True)
class PlannedRun:
    task: Task
    config: RunConfig

    @cached_property
    def run_id(self) -> str:
        return self.config.run_id

    @cached_property
    def flops(self) -> float:
        return cost(self.config).train_flops(self.config.train_tokens)


Placed = tuple[tuple[float, float], PlannedRun]
"""A run, after its place in the order."""


@dataclass(frozen=True)
class Tuned:
    """What is to be run of a cell, and the losses from which that follows."""

    losses: dict[str, float | None]
    """run_id -> loss"""
    runs: list[Placed]
    best: GridPoint
    is_final: bool


class Plan:
    """The cells of a definition, each built once, and which runs are planned, given the finished ones."""

    def __init__(self, definition: SweepDefinition):
        """Raises ValueError if a cell cannot be built or matched, or if no cell is left."""
        self.definition = definition
        self.infeasible: list[tuple[Cell, str]] = []
        """cells that break a constraint, with the reason; they are skipped"""
        self.matches: list[Match] = []
        self._planned: dict[str, PlannedRun] = {}
        self._tuned: dict[int, Tuned] = {}
        """number of a cell among the matches -> what was last known of it"""
        self._built: dict[str, RunConfig] = {}
        """digest of a cell -> one of its runs"""
        if definition.adaptive:
            _check_run(definition, first_proposal(definition))
            fixed = {"tokens": {"train_tokens"}, "steps": {"train_tokens", "batch_tokens"}}
            if varied := fixed.get(definition.matched, set()) & {*definition.varied}:
                raise ValueError(
                    f"sweep {definition.name!r} is matched in {definition.matched}, "
                    f"but varies {', '.join(sorted(varied))}; fix it"
                )
            return
        if definition.sampler == "grid":
            cells = definition.replicated_grid()
        else:
            from sparsedepth.plan.propose import proposals  # imports Optuna, which `status` of a grid does not need

            cells = ((cell, definition.seeds) for cell in proposals(definition))
        for cell_match in match(definition, cells):
            cell = cell_match.cell
            config = cell_match.config
            _check_run(definition, config)
            self._built[digest(cell)] = config
            excess = constraint_excess(definition, config)
            where = ""
            if (tuned_as := cell_match.tuned_as) and is_allowed(definition, config):
                excess = constraint_excess(definition, definition.first_run(tuned_as))
                where = "at the shape of tuning "
            if reason := excess_text(excess, definition.constraints):
                self.infeasible.append((cell, where + reason))
            else:
                self.matches.append(cell_match)
        if not self.matches:
            reason = f": {self.infeasible[0][1]}" if self.infeasible else ""
            raise ValueError(
                f"sweep {definition.name!r} has no cell to run{reason}; change its axes, 'exclude' or 'constraints'"
            )

    def tasks(self, loss_of: LossOf = no_results) -> list[Task]:
        """All known tasks, in the order in which they should start."""
        if self.definition.adaptive:
            assert self.definition.n_trials is not None
            seeds = self.definition.seeds
            return [Task(cell=None, seeds=seeds, proposal_index=i) for i in range(self.definition.n_trials)]
        return [planned.task for planned in self.runs(loss_of)]

    def configs(self, loss_of: LossOf = no_results) -> dict[str, RunConfig]:
        """The known runs by their run_id, in order."""
        return {planned.run_id: planned.config for planned in self.runs(loss_of)}

    def runs(self, loss_of: LossOf = no_results) -> list[PlannedRun]:
        """All known runs, in the order in which they should start; none for an adaptive sampler."""
        runs: dict[str, Placed] = {}
        for tuned in self._cells(loss_of):
            for placed in tuned.runs:
                runs.setdefault(placed[1].run_id, placed)
        return [planned for _, planned in sorted(runs.values(), key=itemgetter(0))]

    def is_open(self, loss_of: LossOf) -> bool:
        """Whether runs will be added once the known runs are finished: the tuned value of a cell is not known yet."""
        return not all(tuned.is_final for tuned in self._cells(loss_of))

    def _cells(self, loss_of: LossOf) -> list[Tuned]:
        """The state of each cell; of thousands only those are computed anew of which a loss has changed."""
        for number, cell_match in enumerate(self.matches):
            known = self._tuned.get(number)
            if known is None or any(loss_of(run_id) != loss for run_id, loss in known.losses.items()):
                self._tuned[number] = self._tuned_cell(cell_match, loss_of)
        return [*self._tuned.values()]

    def _tuned_cell(self, cell_match: Match, loss_of: LossOf) -> Tuned:
        """The runs of a cell at each point of its grid and, once that is final, at the best, with their places."""
        losses: dict[str, float | None] = {}

        def noted(run_id: str) -> float | None:
            return losses.setdefault(run_id, loss_of(run_id))

        tuned_as = cell_match.tuned_as or cell_match.cell
        points, best, is_final = self._tuning(tuned_as, noted)
        tuning_seeds = self.definition.tuning_seeds
        cells: list[tuple[Cell, Sequence[int], int]] = [({**tuned_as, **point}, tuning_seeds, 0) for point in points]
        if is_final:
            cells.append(({**cell_match.cell, **best}, cell_match.seeds, len(tuning_seeds)))
        runs = []
        for cell, seeds, first in cells:
            for round_, seed in enumerate(seeds, start=first):
                planned = self._plan(cell, seed)
                place = (planned.flops, round_) if self.definition.branch_at else (round_, -planned.flops)
                runs.append((place, planned))
        return Tuned(losses, runs, best, is_final)

    def _tuning(self, cell: Cell, loss_of: LossOf) -> tuple[list[GridPoint], GridPoint, bool]:
        """As `tune` for a cell, without points that cannot be built, which count as the worst. Without `tune` no point
        is to be run, and the best is the cell itself."""
        definition = self.definition
        if not definition.tune:
            return [], {}, True

        def can_be_built(point: GridPoint) -> bool:
            """Within the constraints, too. For a listed point failure to build is an error."""
            try:
                config = self._plan({**cell, **point}, definition.tuning_seeds[0]).config
            except ValueError:
                if all(value in definition.tune[name] for name, value in point.items()):
                    raise
                return False
            return is_allowed(definition, config)

        def loss_at(point: GridPoint) -> float | None:
            if not can_be_built(point):
                return math.inf
            losses = [loss_of(self._plan({**cell, **point}, seed).run_id) for seed in definition.tuning_seeds]
            return None if None in losses else fmean(losses)  # ty: ignore[invalid-argument-type] - none is None

        points, best, is_final = tune(definition.tune, loss_at, definition.tune_extensions)
        return [*filter(can_be_built, points)], best, is_final

    @property
    def n_random(self) -> int:
        """How many proposals an adaptive sampler draws before it learns from results."""
        return random_proposals(self.definition)

    def run_of(self, task: Task) -> PlannedRun | None:
        """The run of a task; None for a proposal, whose cell is unknown."""
        return None if task.cell is None else self._plan(task.cell, task.seeds[0])

    @property
    def expected(self) -> int:
        """Total number of runs: with `tune` a lower bound (extensions add runs), with a sampler an upper bound."""
        if self.definition.adaptive:
            return (self.definition.n_trials or 0) * len(self.definition.seeds)
        return len(self.expected_runs())

    @property
    def bound(self) -> Literal["", "at least", "at most"]:
        """Whether the expected runs are 'at least' or 'at most' those that will run; '' if exactly."""
        if self.definition.tune:
            return "at least"
        return "at most" if self.definition.adaptive or self.definition.prune else ""

    def expected_runs(self, loss_of: LossOf = no_results) -> list[RunConfig]:
        """The runs to price, in order: the known ones, and those to come; proposals at drawn points."""
        if self.definition.adaptive:
            return self._proposed
        return [*{one.run_id: one.config for one in (*self.runs(loss_of), *self.to_come(loss_of))}.values()]

    def to_come(self, loss_of: LossOf) -> list[PlannedRun]:
        """The results whose tuned value is not final, at the best so far, without seeds of tuning."""
        return [
            self._plan({**cell_match.cell, **tuned.best}, seed)
            for cell_match, tuned in zip(self.matches, self._cells(loss_of), strict=True)
            if not tuned.is_final
            for seed in cell_match.seeds
            if cell_match.tuned_as or seed not in self.definition.tuning_seeds
        ]

    @cached_property
    def _proposed(self) -> list[RunConfig]:
        """n_trials x seeds runs."""
        definition = self.definition
        assert definition.n_trials is not None
        feasible = self._drawn(min(definition.n_trials, PRICED_PROPOSALS)) or self._drawn(MOST_DRAWN)
        if not feasible:
            raise ValueError(
                f"sweep {definition.name!r}: 'exclude' and 'constraints' leave no point of the space; relax one of them"
            )
        points = [feasible[i % len(feasible)] for i in range(definition.n_trials)]
        return [config.model_copy(update={"seed": seed}) for config in points for seed in definition.seeds]

    def _drawn(self, number: int) -> list[RunConfig]:
        """A run at each of so many random points of the space that may run."""
        from sparsedepth.plan.propose import proposals

        definition = self.definition
        runs = []
        for cell in proposals(definition.model_copy(update={"sampler": "random", "n_trials": number})):
            with suppress(ValueError):  # of a point that cannot be built: the sweep learns to avoid it
                config = definition.first_run(cell)
                runs += [config] * is_allowed(definition, config)
        return runs

    def _plan(self, cell: Cell, seed: int) -> PlannedRun:
        task = Task(cell=cell, seeds=[seed])
        if task.key not in self._planned:
            key = digest(cell)
            if key not in self._built:
                self._built[key] = self.definition.run_config(cell, seed)
            # Replicates differ in their seed, which no check reads.
            self._planned[task.key] = PlannedRun(task, self._built[key].model_copy(update={"seed": seed}))
        return self._planned[task.key]


def random_proposals(definition: SweepDefinition) -> int:
    """How many proposals an adaptive sampler draws at random before it learns from results: the start of TPE, and the
    first generation of NSGA-II, whose population is a sixth of the trials, 8 to 50, for six generations."""
    return 10 if definition.sampler == "tpe" else min(max((definition.n_trials or 0) // 6, 8), 50)


def _check_run(definition: SweepDefinition, config: RunConfig) -> None:
    """Raises ValueError for a run too short to be pruned, a window that hides nothing (another name of the same run),
    and a tokenizer known to have more tokens than the run."""
    if config.sliding_window and config.sliding_window >= max(config.seq_len, config.eval_seq_len or 0):
        raise ValueError(
            f"sliding_window={config.sliding_window} hides nothing of seq_len={config.seq_len}: "
            "the run without one under another id; use null, or a smaller window"
        )
    if definition.prune:
        definition.prune.check_window(config.n_steps, config.log_every)
    size = known_size(config.tokenizer) if kind_of(config.corpus).is_tokenised else None
    if size is not None:
        check_size(config.tokenizer, size, config.vocab_size)


def is_allowed(definition: SweepDefinition, config: RunConfig) -> bool:
    """Whether a run breaks no constraint."""
    return max(constraint_excess(definition, config).values(), default=0.0) <= 0


def constraint_excess(definition: SweepDefinition, config: RunConfig) -> dict[Any, float]:
    """amount / bound - 1 of each constraint; broken if above 0."""
    run_cost = cost(config)
    amounts = {**asdict(run_cost), "train_flops": run_cost.train_flops(config.train_tokens)}
    return {name: amounts[name] / bound - 1 for name, bound in definition.constraints.items()}


def first_proposal(definition: SweepDefinition) -> RunConfig:
    """A run of a sampler's axes: of the first combination of values and interval bounds that is not excluded and can be
    built. Raises ValueError, of the first, if none can."""

    values = [axis.bounds if isinstance(axis, Interval) else axis for axis in definition.axes.values()]
    points = itertools.islice(itertools.product(*values), 10_000)
    cells = (definition.cell(dict(zip(definition.axes, point, strict=True))) for point in points)
    first = next(cells)
    allowed = itertools.filterfalse(definition.is_excluded, itertools.chain([first], cells))
    first = next(allowed, first)
    for cell in itertools.chain([first], allowed):
        with suppress(ValueError):
            return definition.first_run(cell)
    return definition.first_run(first)


def check_objective(definition: SweepDefinition) -> list[Literal["minimize", "maximize"]]:
    """The direction of each objective. Raises ValueError for a quantity without one, or that is not measured."""
    measures = definition.base.get("measures", RunConfig.model_fields["measures"].default)
    found = {name: quantities.rankable(name) for name in definition.objectives}
    for name, quantity in found.items():
        if quantity.measure and quantity.measure not in measures:
            raise ValueError(f"objective={name!r} needs {quantity.measure!r} among the measures of the sweep's base")
    return ["minimize" if quantity.better == "low" else "maximize" for quantity in found.values()]
