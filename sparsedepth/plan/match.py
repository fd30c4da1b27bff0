"""Give every cell of a sweep the size at which it matches the baseline of its depth.

    solve  amount(cell with free = k step) = amount(baseline),  k = 1, 2, ...     (amount grows with the size)

The *baseline* of a depth is the first cell with that n_layers, in the definition's order, at its own size. Sizes move
in steps that keep shapes legal: multiples of 8, and for d_model of two entries per head, and per group of a norm. What
is left over is the mismatch; it is stated, and above the definition's tolerance the sweep is refused before anything
runs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import Cell
from sparsedepth.config.sweep import Matched, SweepDefinition


@dataclass(frozen=True, kw_only=True)
class Match:
    """One cell beside the baseline of its depth."""

    cell: Cell
    n_layers: int
    free: str | None
    """the size that was solved for; None where the cell was left as it is"""
    size: int | None
    ratio: float
    """amount of the cell / amount of the baseline"""


def amount(config: RunConfig, matched: Matched) -> int:
    """How much a run has or spends of what is matched: tokens, steps, parameters, or training FLOPs (3 x forward)."""
    if matched == "tokens":
        return config.train_tokens
    if matched == "steps":
        return config.n_steps
    counted = cost(config)
    if matched == "flops":
        return counted.train_flops(config.train_tokens)
    return counted.params_total if matched == "params_total" else counted.params_active


def match(definition: SweepDefinition, cells: Sequence[Cell]) -> list[Match]:
    """The cells at their matched sizes, in order. Raises ValueError where one is further off than the tolerance, or
    cannot be built; tokens and steps must agree exactly, over all depths."""
    matched = definition.matched
    exact = matched in ("tokens", "steps")
    baselines: dict[int, RunConfig] = {}
    matches = []
    for cell in cells:
        config = definition.run_config(cell, definition.seeds[0])
        baseline = baselines.setdefault(0 if exact else config.n_layers, config)
        target = amount(baseline, matched)
        free = _free_field(definition, config)
        size = None
        if free and config is not baseline:
            size = _solve(lambda n, cell=cell, free=free: _sized(definition, cell, free, n), config, free, target)
            cell = {**cell, free: size}
            config = definition.run_config(cell, definition.seeds[0])
        ratio = amount(config, matched) / target
        if abs(ratio - 1) > (0 if exact else definition.tolerance):
            raise ValueError(_refusal(definition, cell, amount(config, matched), target, free))
        matches.append(Match(cell=cell, n_layers=config.n_layers, free=free if size else None, size=size, ratio=ratio))
    return matches


def _free_field(definition: SweepDefinition, config: RunConfig) -> str | None:
    """The size that this cell is solved for: with experts d_ff is d_expert, without them there is no d_expert."""
    if definition.free == "d_ff" and config.n_experts:
        return "d_expert"
    if definition.free == "d_expert" and not config.n_experts:
        return None
    return definition.free


def _sized(definition: SweepDefinition, cell: Cell, free: str, size: int) -> int:
    enough = {"measure_tokens": 2**30, "fit_tokens": 2**30}  # sizes on the way may be too wide for the run's own
    return amount(definition.run_config({**cell, free: size, **enough}, definition.seeds[0]), definition.matched)


def _solve(amount_at: Callable[[int], int], config: RunConfig, free: str, target: int) -> int:
    """The size, a multiple of the step, whose amount is nearest to the target."""
    step = 8
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


def _refusal(definition: SweepDefinition, cell: Cell, has: int, target: int, free: str | None) -> str:
    message = (
        f"sweep {definition.name!r} states that its runs are matched in {definition.matched}, but {cell} has {has:,} "
    )
    message += f"and the first cell{'' if definition.matched in ('tokens', 'steps') else ' of its depth'} {target:,}"
    if definition.matched in ("tokens", "steps"):
        return f"{message}; change the cells, or what 'matched' says"
    if free is None:
        return f"{message} ({has / target - 1:+.1%}); name a size to solve for: 'free: d_ff', or change the cells"
    return (
        f"{message} ({has / target - 1:+.1%}, tolerance {definition.tolerance:.1%}), the nearest that {free} can bring "
        f"it; choose another 'free', a larger model, or a larger 'tolerance'"
    )


def summary(definition: SweepDefinition, matches: Sequence[Match]) -> list[str]:
    """What was solved for and what mismatch is left, one line per cell that was changed; nothing where none was."""
    solved = [cell_match for cell_match in matches if cell_match.free]
    if not solved:
        return []
    worst = max(solved, key=lambda cell_match: abs(cell_match.ratio - 1))
    head = f"matched in {definition.matched}: {len(solved)} cells solved for, largest mismatch {worst.ratio - 1:+.2%}"
    lines = []
    for cell_match in solved:
        rest = ", ".join(f"{name}={value}" for name, value in cell_match.cell.items() if name != cell_match.free)
        lines.append(f"  {rest or 'base'}: {cell_match.free}={cell_match.size} ({cell_match.ratio - 1:+.2%})")
    return [head, *lines]
