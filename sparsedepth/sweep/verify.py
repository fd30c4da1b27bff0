"""A recipe's trial as a sweep: baseline, recipe, and the recipe with each change left out, on fresh seeds.

The same command again continues, as of every sweep: what is to be run follows from the card alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparsedepth.config.load import build
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.recipe.card import Card
from sparsedepth.recipe.verify import sweep_fields, verified
from sparsedepth.run.process import Stop
from sparsedepth.store.connection import open_store
from sparsedepth.sweep.driver import Driver
from sparsedepth.sweep.machine import Machine
from sparsedepth.sweep.status import RunState


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one invocation."""

    card: Card | None
    """With the trial in it; None while runs are missing."""
    states: list[RunState]
    stop: Stop


def trial_of(card: Card, n_seeds: int) -> SweepDefinition:
    """The sweep. Raises ValueError for a card that recommends nothing, or fewer than three seeds."""
    return build(SweepDefinition, sweep_fields(card, n_seeds), "the card's trial")


def verify(
    card: Card,
    definition: SweepDefinition,
    results: Path,
    machine: Machine,
    watch: Callable[[list[RunState]], None],
    *,
    retry_failed: bool = False,
) -> Trial:
    """Run what is missing of `trial_of` a card, then judge. Raises ValueError as `Driver.run` does."""
    driver = Driver(definition=definition, results=results, machine=machine, watch=watch)
    states = driver.run(retry_failed=retry_failed)
    if driver.stop() or driver.unfinished:
        return Trial(card=None, states=states, stop=driver.stop)
    with open_store(results) as store:
        runs = store.frame("select * from runs")
    return Trial(card=verified(card, runs, definition.seeds), states=states, stop=driver.stop)
