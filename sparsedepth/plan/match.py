"""Choose the size of every cell so that it matches a reference cell in parameters, FLOPs or time.

    solve  amount(cell with free = k step) = amount(reference),  k = 1, 2, ...    (amount grows with the size)

The reference of a depth is the first cell with that n_layers, in the definition's order, at its own size; with
`across: depth` the first cell is the reference of all depths: deep and shallow models then spend the same. Steps keep
shapes valid: multiples of 8, for d_model also of two entries per head and per group of a norm; train_tokens is whole
batches. The mismatch is printed; one above the definition's tolerance is an error before anything runs. Tokens and
steps must agree exactly, over all depths.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import Cell
from sparsedepth.config.sweep import SweepDefinition


@dataclass(frozen=True, kw_only=True)
class Match:
    """A cell, matched with its reference."""

    cell: Cell
    config: RunConfig
    free: str | None
    """the size that was solved for; None if the cell is unchanged"""
    ratio: float
    """amount of the cell / amount of the reference"""
    seeds: Sequence[int] = ()

    @property
    def size(self) -> int | None:
        return self.cell[self.free] if self.free else None


def amount(config: RunConfig, definition: SweepDefinition) -> float:
    """What a run spends of what is matched; settings of one depth count as equally fast. Raises ValueError."""
    if definition.matched == "time":
        if config.n_layers not in definition.step_seconds:
            raise ValueError(
                f"matched: time has no step_seconds of n_layers={config.n_layers}; `sparsedepth plan FILE --set "
                f"matched=flops --calibrate` prints them"
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


def match(definition: SweepDefinition, cells: Sequence[Cell]) -> list[Match]:
    """The cells at their matched sizes, in order. Raises ValueError if a cell cannot be built, or is not matched."""
    matched = definition.matched
    exact = matched in ("tokens", "steps")
    is_shared = exact or definition.across == "depth"
    references: dict[int, RunConfig] = {}
    matches = []
    for cell in cells:
        config = definition.run_config(cell, definition.seeds[0])
        reference = references.setdefault(0 if is_shared else config.n_layers, config)
        target = amount(reference, definition)
        free = definition.free
        if free == "d_ff" and config.n_experts:
            free = "d_expert"
        elif free == "d_expert" and not config.n_experts:
            free = None
        is_solved = free is not None and config is not reference
        if free and is_solved:
            size = _solve(lambda n, cell=cell, free=free: _sized(definition, cell, free, n), config, free, target)
            cell = {**cell, free: size}
            config = definition.run_config(cell, definition.seeds[0])
        spent = amount(config, definition)
        ratio = spent / target
        if abs(ratio - 1) > (0 if exact else definition.tolerance):
            first = "first cell" if is_shared else "first cell of its depth"
            fix = "change the cells or 'matched'" if exact else _fix(definition, ratio, free)
            raise ValueError(
                f"sweep {definition.name!r} states that its runs are matched in {matched}, but {cell} has {spent:,} "
                f"and the {first} has {target:,}; {fix}"
            )
        matches.append(Match(cell=cell, config=config, free=free if is_solved else None, ratio=ratio))
    return matches


def _sized(definition: SweepDefinition, cell: Cell, free: str, size: int) -> float:
    if free == "train_tokens":  # not checked as a run of that length, which could be too short for its schedule
        config = definition.run_config(cell, definition.seeds[0]).model_copy(update={"train_tokens": size})
        return amount(config, definition)
    enough = {"measure_tokens": 2**30, "fit_tokens": 2**30}  # trial sizes may be too wide for the run's own values
    return amount(definition.run_config({**cell, free: size, **enough}, definition.seeds[0]), definition)


def _solve(amount_at: Callable[[int], float], config: RunConfig, free: str, target: float) -> int:
    """The size, a multiple of the step, whose amount is nearest to the target."""
    step = config.batch_tokens if free == "train_tokens" else 8
    if free == "d_model":
        step = math.lcm(8, 2 * config.n_heads, 2 * config.norm_groups if config.norm_kind == "group" else 1)
    low, high = 1, max(1, getattr(config, free) // step)
    if amount_at(step) == amount_at(2 * step):
        raise ValueError(f"free={free!r} changes nothing in {config.n_layers} layers with n_experts={config.n_experts}")
    while amount_at(high * step) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if amount_at(middle * step) < target else (low, middle)
    return step * min((low, high), key=lambda k: abs(amount_at(k * step) - target))


def _fix(definition: SweepDefinition, ratio: float, free: str | None) -> str:
    """What helps against a mismatch above the tolerance."""
    if free is None:
        example = "train_tokens" if definition.matched == "flops" else "d_ff"
        return f"name a size to solve for: 'free: {example}', or change the cells"
    off = f"{ratio - 1:+.1%}, tolerance {definition.tolerance:.1%}"
    return f"that is {off}, at the best {free}; choose another 'free', a larger model, or a larger 'tolerance'"


def summary(definition: SweepDefinition, matches: Sequence[Match]) -> list[str]:
    """A line for each cell whose size was solved for, with the remaining mismatch."""
    lines = []
    solved = [one for one in matches if one.free]
    if solved:
        worst = max((one.ratio - 1 for one in solved), key=abs)
        lines = [f"matched in {definition.matched}: sizes of {len(solved)} cells, largest mismatch {worst:+.2%}"]
    for one in solved:
        fields = ", ".join(f"{name}={value}" for name, value in one.cell.items() if name != one.free)
        lines.append(f"  {fields or 'base'}: {one.free}={one.size} ({one.ratio - 1:+.2%})")
    return lines
