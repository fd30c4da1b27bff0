"""Verify a recipe by a sweep: baseline, recipe, and the recipe without each change, on fresh seeds.

The card alone determines the runs, so the same command resumes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparsedepth.config.load import build
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.recipe.card import Card
from sparsedepth.recipe.verify import sweep_fields, verified
from sparsedepth.run.signals import Stop
from sparsedepth.store.connection import open_store
from sparsedepth.sweep.driver import Driver
from sparsedepth.sweep.machine import Machine
from sparsedepth.sweep.status import RunState


@dataclass(frozen=True, kw_only=True)
class VerificationResult:
    card: Card | None
    """The verified card; None while runs are missing."""
    states: list[RunState]
    stop: Stop


def verification_sweep(card: Card, n_seeds: int) -> SweepDefinition:
    """Raises ValueError for a card without a recommendation, or fewer than three seeds."""
    return build(SweepDefinition, sweep_fields(card, n_seeds), "the card's verification")


def verify(
    card: Card,
    definition: SweepDefinition,
    results: Path,
    machine: Machine,
    on_progress: Callable[[list[RunState]], None],
    *,
    retry_failed: bool = False,
) -> VerificationResult:
    """Run the missing runs of a `verification_sweep`, then compare. Raises ValueError as `Driver.run`."""
    driver = Driver(definition=definition, results=results, machine=machine, on_progress=on_progress)
    result = driver.run(retry_failed=retry_failed)
    if result.stop() or result.unfinished:
        return VerificationResult(card=None, states=result.states, stop=result.stop)
    with open_store(results) as store:
        runs = store.frame("select * from runs")
    return VerificationResult(card=verified(card, runs, definition.seeds), states=result.states, stop=result.stop)
