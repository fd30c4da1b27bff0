"""The remaining runs of a sweep, for `plan --out`, `work` and the size of a Slurm array."""

import functools
from pathlib import Path

from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.price import expected_runs
from sparsedepth.plan.results_index import ResultsIndex
from sparsedepth.store.run_record import MARKER
from sparsedepth.sweep.status import is_without_result


def runs_left(definition: SweepDefinition, results: Path) -> list[RunConfig]:
    """The expected runs of a sweep that are neither complete in `results` nor ended without a result. Raises ValueError
    for a cell that cannot be built or matched."""
    if definition.adaptive:  # proposals are unknown, so complete runs are only counted
        return expected_runs(definition)[0][len(list(results.glob(f"runs/*/{MARKER}"))) :]
    index = ResultsIndex(results, definition, functools.cache(functools.partial(is_without_result, results)))
    return [run for run in expected_runs(definition, index.loss_of)[0] if index.loss_of(run.run_id) is None]
