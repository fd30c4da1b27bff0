"""The runs of the definition that a results folder is filled from."""

from pathlib import Path

from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.results_index import ResultsIndex
from sparsedepth.plan.tasks import Plan


def planned_runs(definition: SweepDefinition, results: Path) -> list[RunConfig]:
    """The runs that are known, given those that are finished; an adaptive sampler's are not before it proposes them."""
    return [planned.config for planned in Plan(definition).runs(ResultsIndex(results, definition).loss_of)]
