"""The definition that a results folder is filled from, as `sweep` left it there."""

from pathlib import Path

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import DEFINITION, SweepDefinition
from sparsedepth.plan.results_index import ResultsIndex
from sparsedepth.plan.tasks import Plan


def read_definition(results: Path) -> SweepDefinition | None:
    """The sweep that fills this folder; None for a folder of single runs."""
    path = results / DEFINITION
    return build(SweepDefinition, read_yaml(path), str(path)) if path.exists() else None


def planned_runs(definition: SweepDefinition, results: Path) -> list[RunConfig]:
    """The runs that are known, given those that are finished; an adaptive sampler's are not before it proposes them."""
    return [planned.config for planned in Plan(definition).runs(ResultsIndex(results, definition).loss_of)]
