"""What a sweep will run: its items of work, in the order in which they start.

A grid's item is one run (a cell with one seed), the longest first within each round of seeds, so that every cell has
its first replicate early and the last workers finish together. A TPE item is a proposal with all its seeds, since
the sampler wants their mean.
"""

from dataclasses import dataclass
from typing import Any, Literal

from sparsedepth import glossary
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import Interval, SweepDefinition
from sparsedepth.files import digest
from sparsedepth.model.cost import cost


@dataclass(frozen=True, kw_only=True)
class Item:
    """One item of the queue: an Optuna trial."""

    cell: dict[str, Any] | None
    """RunConfig fields over the base; None where the sampler proposes them"""
    seeds: list[int]
    slot: int = 0
    """tells one proposal from another"""

    @property
    def key(self) -> str:
        return digest({"cell": self.cell, "seeds": self.seeds, "slot": self.slot})

    def runs(self, definition: SweepDefinition) -> list[RunConfig]:
        """The runs of an item whose cell is known."""
        assert self.cell is not None
        return [definition.run_config(self.cell, seed) for seed in self.seeds]


def items(definition: SweepDefinition) -> list[Item]:
    """The whole queue. Raises ValueError for a cell that cannot be built, before anything runs."""
    if definition.sampler == "tpe":
        assert definition.n_trials is not None
        definition.run_config(first_proposal(definition), definition.seeds[0])
        return [Item(cell=None, seeds=definition.seeds, slot=slot) for slot in range(definition.n_trials)]
    found: dict[str, tuple[int, float, Item]] = {}
    spent: dict[int, list[int]] = {}
    for cell in definition.grid():
        for round_, seed in enumerate(definition.seeds):
            config = definition.run_config(cell, seed)
            work = 3.0 * cost(config).flops_per_token * config.train_tokens
            found.setdefault(config.run_id, (round_, -work, Item(cell=cell, seeds=[seed])))
            spent.setdefault(_compared(definition, config), []).append(_matched(definition, config))
    for amounts in spent.values():
        if max(amounts) > 1.01 * min(amounts):
            raise ValueError(
                f"sweep {definition.name!r} states that its runs are matched in {definition.matched}, but they spend "
                f"{min(amounts):,} to {max(amounts):,}; change the cells, or what 'matched' says"
            )
    return [item for _, _, item in sorted(found.values(), key=lambda entry: entry[:2])]


def _compared(definition: SweepDefinition, config: RunConfig) -> int:
    """Runs with the same value must match: all of them in tokens, those of one depth in anything else."""
    return 0 if definition.matched == "tokens" else config.n_layers


def _matched(definition: SweepDefinition, config: RunConfig) -> int:
    """How much a run spends of what is matched."""
    if definition.matched == "tokens":
        return config.train_tokens
    counted = cost(config)
    if definition.matched == "flops":
        return counted.flops_per_token * config.train_tokens
    return counted.params_total if definition.matched == "params_total" else counted.params_active


def first_proposal(definition: SweepDefinition) -> dict[str, Any]:
    """One point of the space, to see that it can be built."""
    return {
        name: (round(axis.low) if axis.whole else axis.low) if isinstance(axis, Interval) else axis[0]
        for name, axis in definition.space.items()
    }


def check_objective(definition: SweepDefinition) -> Literal["minimize", "maximize"]:
    """'minimize' or 'maximize'. Raises ValueError for an objective that is no column with a better direction."""
    quantity = glossary.run_quantity(definition.objective)
    if quantity is None or not quantity.better:
        known = ", ".join(entry.name for entry in glossary.RUNS if entry.better)
        raise ValueError(
            f"objective={definition.objective!r} is not a quantity that can be optimised; choose of: {known}"
        )
    measure = glossary.measured_by(definition.objective)
    measures = definition.base.get("measures", RunConfig.model_fields["measures"].default)
    if measure is not None and measure not in measures:
        raise ValueError(f"objective={definition.objective!r} needs {measure!r} among the measures of the sweep's base")
    return "minimize" if quantity.better == "low" else "maximize"
