"""The budgets of a sweep's cells: matched with that of a reference cell, and with `branch_at` several from one run.

    solve  amount(cell with free = k step) = amount(reference),  k = 1, 2, ...    (amount grows with the size)

The reference of a depth is the first cell with that n_layers, in the definition's order, at its own size; with
`across: depth` the first cell is the reference of all depths: deep and shallow models then spend the same. Steps keep
shapes valid: multiples of 8, for d_model also of two entries per head and per group of a norm; train_tokens is whole
batches. A mismatch above the definition's tolerance is an error; tokens and steps must agree exactly, over all depths.

With schedule wsd (2404.06395) a run of n steps shares all steps before its decay with a longer one. Each share s of
`branch_at` becomes a cell that trains for s n steps with the same steps of warm-up, and the longer run goes on from the
state before its decay (`TrainConfig.trunk_key`). Branches of one trunk share its seed and its noise: they are one unit
to the statistics."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from sparsedepth.config.cost import cost
from sparsedepth.config.model import CARRIES
from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import Cell, cell_digest, grid_points
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.words.sweep import mismatch_fix

ENOUGH = {"measure_tokens": 2**30, "fit_tokens": 2**30}
"""Of a run of a trial size, which may be too wide for its own values."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """A cell, matched with its reference."""

    cell: Cell
    config: RunConfig
    free: str | None
    """the size that was solved for; None if the cell is unchanged, and for a branch, a share of its trunk"""
    ratio: float
    """amount of the cell / amount of the reference; of a branch, of the reference's branch"""
    seeds: Sequence[int]
    tuned_as: Cell | None = None
    """the cell, at the shape `tune_at`, whose tuned values it takes over; None: its own"""

    @property
    def size(self) -> int | None:
        return self.cell[self.free] if self.free else None


def amount(config: RunConfig, definition: SweepDefinition) -> float:
    """What a run spends of what is matched; settings of one depth count as equally fast. Raises ValueError."""
    if definition.matched == "time":
        if config.n_layers not in definition.step_seconds:
            raise ValueError(
                f"matched: time has no step_seconds of n_layers={config.n_layers}; "
                "`sparsedepth plan FILE --set matched=flops --calibrate` prints them"
            )
        return config.n_steps * definition.step_seconds[config.n_layers]
    run_cost = cost(config)
    amounts = {
        "tokens": config.train_tokens,
        "steps": config.n_steps,
        "flops": run_cost.train_flops(config.train_tokens),
        "params_total": run_cost.params_total,
        "params_active": run_cost.params_active,
    }
    return amounts[definition.matched]


def match(definition: SweepDefinition, cells: Iterable[tuple[Cell, Sequence[int]]]) -> list[Match]:
    """The cells, each with its seeds, at their matched sizes, in order, after their branches. Raises ValueError if one
    cannot be built, matched or branched."""
    matching = _Matching(definition=definition)
    found = {cell_digest(cell): (cell, matching.of(cell, seeds)) for cell, seeds in cells}
    if not definition.tune_at:
        return [match for _, matches in found.values() for match in matches]
    matches = []
    for key, (cell, own) in [*found.items()]:
        at = {**cell, **definition.tune_at}
        if (of_shape := cell_digest(at)) not in found:
            found[of_shape] = at, matching.of(at, ())
        for match, tuned in zip(own, found[of_shape][1], strict=True):
            if key != of_shape:
                _check_carried(definition, match.config, tuned.config)
                match = replace(match, tuned_as=tuned.cell)
            matches.append(match)
    return matches


@dataclass(frozen=True, kw_only=True)
class _Matching:
    """Cells of one definition, in its order: the first one is the reference of all, or of its depth."""

    definition: SweepDefinition
    references: dict[int, RunConfig] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        return self.definition.matched in ("tokens", "steps")

    @property
    def is_shared(self) -> bool:
        return self.is_exact or self.definition.across == "depth"

    @property
    def tolerance(self) -> float:
        return 0 if self.is_exact else self.definition.tolerance

    def of(self, cell: Cell, seeds: Sequence[int]) -> list[Match]:
        """A cell after its branches."""
        definition = self.definition
        first_cell = "the first cell" if self.is_shared else "the first cell of its depth"
        if definition.same_params_blocks and self.references:
            cell = _of_same_blocks(definition, cell, self.references[0])
        config = definition.first_run(cell)
        reference = self.references.setdefault(0 if self.is_shared else config.n_layers, config)
        target = amount(reference, definition)
        free = None if config is reference else _free_of(config, definition.free)
        if free:
            cell = {**cell, free: _solve(lambda n: _sized(definition, cell, free, n), config, free, target)}
            config = definition.first_run(cell)
        points = grid_points(definition.tune) if definition.tune else ()
        tuned = (definition.first_run({**cell, **point}) for point in points)
        spent = max((amount(one, definition) for one in (config, *tuned)), key=lambda spent: abs(spent - target))
        ratio = spent / target
        if abs(ratio - 1) > self.tolerance:
            fix = "change the cells or 'matched'" if self.is_exact else mismatch_fix(definition, ratio, free)
            raise _mismatch(definition, f"{cell} has {spent:,} and {first_cell} has {target:,}; {fix}")
        own = Match(cell=cell, config=config, free=free, ratio=ratio, seeds=seeds)
        return [*_branches(definition, own, reference, first_cell, self.tolerance), own]


def _free_of(config: RunConfig, free: str | None) -> str | None:
    """The size that is solved for in a cell: that of its experts where it has some."""
    if free == "d_ff" and config.n_experts:
        return "d_expert"
    return None if free == "d_expert" and not config.n_experts else free


def _of_same_blocks(definition: SweepDefinition, cell: Cell, reference: RunConfig) -> Cell:
    """The cell at the width whose blocks have the parameters of the reference's: heads of its size, and of the widths
    with d_ff from 1 to 4 d_model the one with d_ff / d_model nearest to its."""
    assert reference.d_ff is not None
    d_head, ratio = reference.d_model // reference.n_heads, reference.d_ff / reference.d_model
    target = cost(reference).params_blocks

    def params(n_heads: int, d_ff: int) -> int:
        size = {"d_model": n_heads * d_head, "n_heads": n_heads, "d_ff": d_ff}
        return cost(definition.first_run({**cell, **size, **ENOUGH})).params_blocks

    sizes, n_heads = [], 1
    while (least := params(n_heads, 1)) < target:
        d_model = n_heads * d_head
        widest = params(n_heads, 4 * d_model) - least  # of experts: d_expert has steps in d_ff, or is fixed
        d_ff = 1 + round((target - least) * (4 * d_model - 1) / max(widest, 1))
        if d_model <= d_ff <= 4 * d_model and abs(params(n_heads, d_ff) / target - 1) <= definition.tolerance:
            sizes.append({"d_model": d_model, "n_heads": n_heads, "d_ff": d_ff})
        n_heads += 1
    if not sizes:
        raise _mismatch(
            definition,
            f"no width of heads of {d_head} channels with d_ff from 1 to 4 d_model gives {cell} the {target:,} "
            "parameters in blocks of the first cell; choose another depth, or smaller heads",
        )
    return {**cell, **min(sizes, key=lambda size: abs(math.log(size["d_ff"] / size["d_model"] / ratio)))}


def _check_carried(definition: SweepDefinition, config: RunConfig, tuned: RunConfig) -> None:
    """Raises ValueError where the parametrisation has no rule for a size that differs, and no sweep has measured what
    carrying over it costs."""
    rule = f"parametrisation={config.parametrisation!r}"
    sizes = [name for name in ("n_layers", "d_model") if getattr(config, name) != getattr(tuned, name)]
    unruled = [name for name in sizes if name not in CARRIES[config.parametrisation]]
    told = f"sweep {definition.name!r} carries tuned values from {definition.tune_at}"
    if unruled and definition.carry_regret is None:
        raise ValueError(
            f"{told} to {unruled[0]}={getattr(config, unruled[0])}, for which {rule} has no rule; use 'completep', "
            "leave 'at' out, or set carry_regret, which `scaling carry` measures in a sweep tuned at every shape"
        )
    heads = [one.d_model // one.n_heads for one in (config, tuned)]
    if "d_model" in sizes and heads[0] != heads[1] and definition.carry_regret is None:
        raise ValueError(f"{told} to heads of {heads[0]} channels from {heads[1]}; let n_heads move with d_model")


def _mismatch(definition: SweepDefinition, told: str) -> ValueError:
    return ValueError(f"sweep {definition.name!r} states that its runs are matched in {definition.matched}, but {told}")


def _sized(definition: SweepDefinition, cell: Cell, free: str, size: int) -> float:
    if free == "train_tokens":  # not checked as a run of that length, which could be too short for its schedule
        return amount(definition.first_run(cell).model_copy(update={"train_tokens": size}), definition)
    return amount(definition.first_run({**cell, free: size, **ENOUGH}), definition)


def _solve(amount_at: Callable[[int], float], config: RunConfig, free: str, target: float) -> int:
    """The size, a multiple of the step, whose amount is nearest to the target."""
    step = config.batch_tokens if free == "train_tokens" else 8
    if free == "d_model":
        step = math.lcm(8, 2 * config.n_heads, 2 * config.norm_groups if config.norm_kind == "group" else 1)
    low = 1
    high = max(1, getattr(config, free) // step)
    if amount_at(step) == amount_at(2 * step):
        raise ValueError(f"free={free!r} changes nothing in {config.n_layers} layers with n_experts={config.n_experts}")
    while amount_at(high * step) < target:
        low = high
        high = 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if amount_at(middle * step) < target else (low, middle)
    return step * min((low, high), key=lambda k: abs(amount_at(k * step) - target))


def _branches(
    definition: SweepDefinition, match: Match, reference: RunConfig, first_cell: str, tolerance: float
) -> list[Match]:
    """The branches of a cell, shortest first. Raises ValueError without a trunk, and for a branch that is too short, or
    does not match the reference's, since steps are whole."""
    if not definition.branch_at:
        return []
    whole = match.config
    needs = f"branch_at={definition.branch_at} needs"
    if whole.schedule != "wsd":
        raise ValueError(f"{needs} schedule=wsd, not {whole.schedule}; set schedule: wsd in the base")
    if whole.warmup_tokens is None:
        tokens = max(1, whole.warmup_steps) * whole.batch_tokens
        raise ValueError(
            f"{needs} one warm-up for all budgets; set warmup_tokens: {tokens} in the base in place of warmup_frac"
        )
    cells = [{**match.cell, "train_tokens": _branch_tokens(whole, share)} for share in definition.branch_at]
    branches = []
    for share, cell in zip(definition.branch_at, cells, strict=True):
        config = definition.first_run(cell)
        first = reference.model_copy(update={"train_tokens": _branch_tokens(reference, share)})
        ratio = amount(config, definition) / amount(first, definition)
        if abs(ratio - 1) > tolerance:
            fix = ", train for longer, or set a larger 'tolerance'" if tolerance else ""
            raise _mismatch(
                definition,
                f"branch_at={share:g} is step {config.n_steps} of {whole.n_steps} in {match.cell} and step "
                f"{first.n_steps} of {reference.n_steps} in {first_cell}, {ratio - 1:+.1%}; "
                f"choose shares that are whole steps of both{fix}",
            )
        branches.append(replace(match, cell=cell, config=config, free=None, ratio=ratio))
    return branches


def _branch_tokens(whole: RunConfig, share: float) -> int:
    """The tokens of the branch at a share of the whole run's."""
    steps = round(share * whole.n_steps)
    if steps < 1 or steps == whole.n_steps:
        raise ValueError(f"branch_at={share:g} of {whole.n_steps} steps is no step between them; train for longer")
    branch = whole.model_copy(update={"train_tokens": steps * whole.batch_tokens})
    if branch.warmup_steps > branch.stable_steps:
        raise ValueError(
            f"branch_at={share:g} ends after {steps} steps, of which {branch.warmup_steps} are warm-up and "
            f"{steps - branch.stable_steps} decay; lower warmup_tokens={whole.warmup_tokens}, or branch later"
        )
    return branch.train_tokens


def trunk_names(runs: Sequence[RunConfig]) -> dict[str, str]:
    """run_id -> 'trunk 3f2a1b' of the longest of the runs that share a trunk, 'branch 1 of 3 of trunk 3f2a1b' of the
    others, shortest first; none for a run that shares no steps with another."""
    names = {}
    for (key, _), shared in _by_trunk(runs).items():
        *branches, whole = sorted(shared, key=lambda config: config.train_tokens)
        if branches:
            names[whole.run_id] = f"trunk {str(key)[:6]}"
        for number, branch in enumerate(branches, start=1):
            names[branch.run_id] = f"branch {number} of {len(branches)} of trunk {str(key)[:6]}"
    return names


def shared_steps(runs: Sequence[RunConfig], among: Sequence[RunConfig] | None = None) -> list[int]:
    """For each run the steps that it takes over from the next shorter run of its trunk `among` these, by default the
    runs; 0 if none."""
    trunks = _by_trunk(runs if among is None else among)
    shared = []
    for config in runs:
        others = (other.stable_steps for other in trunks.get((config.trunk_key, config.seed), ()))
        shared.append(max((steps for steps in others if steps < config.stable_steps), default=0))
    return shared


def _by_trunk(runs: Sequence[RunConfig]) -> dict[tuple[str | None, int], list[RunConfig]]:
    """The runs with a trunk by its key and seed."""
    trunks = defaultdict(list)
    for config in runs:
        if config.trunk_key:
            trunks[config.trunk_key, config.seed].append(config)
    return trunks
